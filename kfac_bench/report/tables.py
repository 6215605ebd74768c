"""Tables of results and the text of their numbers: Markdown and the terminal.

Text in cells may come from event files. The code that shows a table must escape its text.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import rich.table
from rich.text import Text

from kfac_bench.record.score import Row, Spread

DASH = "\u2013"


@dataclass(frozen=True)
class Link:
    """A cell with a link; ``href`` is relative to the folder of the file that holds the table."""

    text: str
    href: str


Value = str | int | float | Link | None
"""The value of a cell. Numbers are shown with four digits and sorted as numbers, None as a dash."""


@dataclass(frozen=True)
class Table:
    """A title, rows with one value per column, and notes below the rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Return the table as GitHub's Markdown, with its title and notes."""
        numeric = [all(_is_number(row[i]) for row in self.rows) for i in range(len(self.columns))]
        lines = [
            f"**{escape_markdown(self.title)}**",
            "",
            _line(escape_markdown(c) for c in self.columns),
            _line("---:" if right else "---" for right in numeric),
            *(_line(map(_markdown, row)) for row in self.rows),
            "",
            *(f"* {escape_markdown(note)}" for note in self.notes),
        ]
        return "\n".join(lines).rstrip() + "\n"


def text(value: Value) -> str:
    """Return the text of a value, not escaped."""
    match value:
        case None:
            return DASH
        case Link():
            return value.text
        case float():
            return f"{value:.4g}"
        case int():
            return f"{value:,}"
    return value


def escape_markdown(words: str) -> str:
    """Escape every character that would end a table cell or start markup."""
    # A line break would end the table, and GitHub reads tags and entities inside of cells.
    one_line = " ".join(words.split())
    escaped = one_line.replace("&", "&amp;").replace("<", "&lt;")
    escaped = re.sub(r"([\\`*~\[\]|])", r"\\\1", escaped)
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\_", escaped)  # inside of a word it is no markup


def _is_number(value: Value) -> bool:
    return value is None or isinstance(value, int | float)


def _markdown(value: Value) -> str:
    shown = escape_markdown(text(value))
    if isinstance(value, Link):
        # These characters would end the <...> around the address.
        href = re.sub(r"[<>\n]", "", value.href)
        return f"[{shown}](<{href}>)"
    return shown


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


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


def terminal_table(rows: Sequence[Row]) -> rich.table.Table:
    """Return the rows as a table for a rich ``Console``. Cells are text, never rich markup.

    Only the first row of a task names the task, because the name is long. If no row has a target,
    the columns of the target are left out.
    """
    table = rich.table.Table()
    shown = range(len(COLUMNS)) if any(line.has_target for line in rows) else (0, 1, 4)
    for i, column in ((i, COLUMNS[i]) for i in shown):
        # On a terminal of 80 columns the whole head would take four lines.
        head = column.removesuffix(" (median, range)")
        table.add_column(head, justify="left" if i < 2 else "right", overflow="fold")
    above = None
    for line in rows:
        task, *others = [cells(line)[i] for i in shown]
        if above not in (None, task):
            table.add_section()
        table.add_row(*(Text(cell) for cell in ("" if task == above else task, *others)))
        above = task
    return table
