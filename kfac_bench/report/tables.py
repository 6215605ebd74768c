"""A table of results, before it is known where it is shown: terminal, Markdown or a page.

Text in cells may come from event files: whoever shows it, escapes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DASH = "\u2013"


@dataclass(frozen=True)
class Link:
    """A cell that leads somewhere: ``href`` is relative to where the table is written."""

    text: str
    href: str


Value = str | int | float | Link | None
"""Of a cell. Numbers are shown to four digits and sorted as numbers; None is shown as a dash."""


@dataclass(frozen=True)
class Table:
    """Rows of as many values as there are columns; notes stand below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table as GitHub's Markdown, title and notes included."""
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
    """How a value is shown, unescaped."""
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
    """Escape what would end a table cell or be read as markup."""
    one_line = " ".join(words.split())
    return re.sub(r"([\\`*\[\]|])", r"\\\1", one_line.replace("&", "&amp;").replace("<", "&lt;"))


def _is_number(value: Value) -> bool:
    return value is None or isinstance(value, int | float)


def _markdown(value: Value) -> str:
    shown = escape_markdown(text(value))
    if isinstance(value, Link):
        href = re.sub(r"[<>\n]", "", value.href)
        return f"[{shown}](<{href}>)"
    return shown


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
