"""Results in words: numbers with as many digits as they deserve, rows as a table of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from kfac_bench.record.score import Row, Spread
from kfac_bench.report.tables import DASH, escape_markdown

COLUMNS = (
    "task",
    "optimizer",
    "steps to target",
    "seconds to target (median, range)",
    "final metric",
)
MISSED = "not reached"
NO_TARGET = "no target"


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """Write the row as text, one cell per column of :data:`COLUMNS`."""
    if not row.has_target:
        return row.task, row.optimizer, NO_TARGET, NO_TARGET, metric(row.final)
    time = seconds(row.seconds.median)
    if extent := between(row.seconds, seconds):
        time += f" ({extent})"
    if row.reached < row.seeds:
        time += f", {row.reached} of {row.seeds} seeds"
    return row.task, row.optimizer, count(row.steps.median), time, metric(row.final)


def seconds(value: float) -> str:
    """Write seconds with three digits, or all before the point; infinite: not reached."""
    if math.isinf(value):
        return MISSED
    return f"{value:#.3g}".rstrip(".") if abs(value) < 100 else f"{value:.0f}"


def count(value: float) -> str:
    """Write steps (a median may be a half); infinite: not reached."""
    if math.isinf(value):
        return MISSED
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def metric(value: float) -> str:
    """Write a metric with four digits (six above 1000); a dash if there is none."""
    if math.isnan(value):
        return DASH
    return f"{value:#.4g}" if abs(value) < 999 else f"{value:.6g}"


def between(spread: Spread, write: Callable[[float], str]) -> str:
    """Write the range, such as ``3.10 (dash) not reached``; empty where all seeds agree."""
    if spread.low == spread.high:
        return ""
    return f"{write(spread.low)} {DASH} {write(spread.high)}"


def markdown_table(rows: Sequence[Row]) -> str:
    """Write the rows as a Markdown table, with a newline at its end."""
    lines = [list(COLUMNS), ["---", "---", "---:", "---:", "---:"]]
    lines += [[escape_markdown(cell) for cell in cells(line)] for line in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def terminal_table(rows: Sequence[Row]) -> Table:
    """Lay the rows out for a rich ``Console``; cells are text, never rich markup.

    A task is named once, in the first of its rows: it is too long for each of them.
    """
    table = Table()
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if i < 2 else "right", overflow="fold")
    above = None
    for line in rows:
        task, *others = cells(line)
        if above not in (None, task):
            table.add_section()
        table.add_row(*(Text(cell) for cell in ("" if task == above else task, *others)))
        above = task
    return table
