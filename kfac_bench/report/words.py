"""Results as text: numbers with a sensible number of digits, and rows as a table."""

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
    """Return the row as text, one cell per column of :data:`COLUMNS`."""
    if not row.has_target:
        return row.task, row.optimizer, NO_TARGET, NO_TARGET, metric(row.final)
    time = seconds(row.seconds.median)
    if extent := between(row.seconds, seconds):
        time += f" ({extent})"
    if row.reached < row.seeds:
        time += f", {row.reached} of {row.seeds} seeds"
    return row.task, row.optimizer, count(row.steps.median), time, metric(row.final)


def seconds(value: float) -> str:
    """Write seconds with three digits, or all digits before the point; infinity: not reached."""
    if math.isinf(value):
        return MISSED
    return f"{value:#.3g}".rstrip(".") if abs(value) < 100 else f"{value:.0f}"


def count(value: float) -> str:
    """Write steps, with one decimal for a median between two; infinity: not reached."""
    if math.isinf(value):
        return MISSED
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def metric(value: float) -> str:
    """Write a metric with four digits, or six from 999 on; a dash if there is no number."""
    if math.isnan(value):
        return DASH
    return f"{value:#.4g}" if abs(value) < 999 else f"{value:.6g}"


def between(spread: Spread, write: Callable[[float], str]) -> str:
    """Write the range from the smallest to the largest value; empty if all seeds are equal."""
    if spread.low == spread.high:
        return ""
    return f"{write(spread.low)} {DASH} {write(spread.high)}"


def markdown_table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table that ends with a newline."""
    lines = [list(COLUMNS), ["---", "---", "---:", "---:", "---:"]]
    lines += [[escape_markdown(cell) for cell in cells(line)] for line in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def terminal_table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table for a rich ``Console``. Cells are text, never rich markup.

    Only the first row of a task names the task, because the name is long.
    """
    table = Table()
    for i, column in enumerate(COLUMNS):
        # On a terminal of 80 columns the whole head would take four lines.
        head = column.removesuffix(" (median, range)")
        table.add_column(head, justify="left" if i < 2 else "right", overflow="fold")
    above = None
    for line in rows:
        task, *others = cells(line)
        if above not in (None, task):
            table.add_section()
        table.add_row(*(Text(cell) for cell in ("" if task == above else task, *others)))
        above = task
    return table
