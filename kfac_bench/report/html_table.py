"""Tables on the page: of each cell the text, what it is sorted by, and where it leads.

tables.js sorts by ``key``: a number, ``inf`` (a miss) or ``none`` (nothing there); without one a
cell is sorted by its text.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from kfac_bench.record.runs import number, plain
from kfac_bench.report.tables import DASH, Link, Table, Value, text


@dataclass(frozen=True)
class HtmlCell:
    """One cell as the template writes it (and escapes it)."""

    text: str
    key: str | None = None
    href: str | None = None

    @property
    def number(self) -> bool:
        """Whether it stands to the right, as numbers do."""
        return self.key is not None


@dataclass(frozen=True)
class Grid:
    """A table to sort: a column is to the right where all its cells are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[HtmlCell]]
    notes: Sequence[str] = ()

    def right(self, column: int) -> bool:
        """Whether that column holds numbers."""
        return all(row[column].number for row in self.rows)


def grid(table: Table) -> Grid:
    """``table`` as the page shows it."""
    return Grid(
        plain(table.title),
        [plain(column) for column in table.columns],
        [[cell(value) for value in row] for row in table.rows],
        [plain(note) for note in table.notes],
    )


def cell(value: Value, shown: str | None = None) -> HtmlCell:
    """A cell of a value, in other words (``shown``) if given."""
    words = plain(text(value)) if shown is None else shown
    match value:
        case None:
            return HtmlCell(words, "none")
        case Link():
            return HtmlCell(words, href=value.href if _leads_on(value.href) else None)
        case str():
            return HtmlCell(words)
    key = number(value)
    if math.isnan(key):
        return HtmlCell(DASH if shown is None else shown, "none")
    return HtmlCell(words, repr(key))


def link_from(folder: Path, path: Path) -> str:
    """A relative address of ``path`` on a page in ``folder``; both are resolved."""
    return quote(os.fsencode(os.path.relpath(path, folder)))


def _leads_on(href: str) -> bool:
    """Whether it is a web address or a path; a colon might start another kind of address."""
    return re.fullmatch(r"(https?://|(?!//))[^:\\\s\x00-\x20]+", href) is not None
