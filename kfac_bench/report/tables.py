"""A table of results, to be shown in a terminal, in Markdown or on a page.

Text in cells may come from event files. The code that shows a table must escape its text.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    return re.sub(r"([\\`*\[\]|])", r"\\\1", one_line.replace("&", "&amp;").replace("<", "&lt;"))


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
