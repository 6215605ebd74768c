"""Tables on the page: each cell has a text, a key to sort by, and perhaps a link.

tables.js sorts by the key: a number, ``inf`` (a missed target) or ``none`` (no value). A cell
without a key is sorted by its text.
"""

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
    """One cell, before the template escapes its text."""

    text: str
    key: str | None = None
    href: str | None = None

    @property
    def is_number(self) -> bool:
        """Whether the cell holds a number, which is aligned to the right."""
        return self.key is not None


@dataclass(frozen=True)
class HtmlTable:
    """A table that readers can sort."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[HtmlCell]]
    notes: Sequence[str] = ()

    def right(self, column: int) -> bool:
        """Whether the column is aligned to the right, because all its cells are numbers."""
        return all(row[column].is_number for row in self.rows)


def to_html_table(table: Table) -> HtmlTable:
    """Return the table as the page shows it."""
    return HtmlTable(
        plain(table.title),
        [plain(column) for column in table.columns],
        [[cell(value) for value in row] for row in table.rows],
        [plain(note) for note in table.notes],
    )


def cell(value: Value, shown: str | None = None) -> HtmlCell:
    """Return the cell of a value; ``shown`` is its text, if the usual text does not fit."""
    words = plain(text(value)) if shown is None else shown
    match value:
        case None:
            return HtmlCell(words, "none")
        case Link():
            return HtmlCell(words, href=value.href if _leads_on(value.href) else None)
        case str():
            return HtmlCell(words)
    # repr writes all digits, and inf for a missed target.
    key = number(value)
    if math.isnan(key):
        return HtmlCell(DASH if shown is None else shown, "none")
    return HtmlCell(words, repr(key))


def link_from(folder: Path, path: Path) -> str:
    """Return the relative address of ``path`` on a page in ``folder``; both are resolved."""
    return quote(os.fsencode(os.path.relpath(path, folder)))


def _leads_on(href: str) -> bool:
    """Whether `href` is a web address or a path. Other schemes, such as javascript:, are not."""
    return re.fullmatch(r"(https?://|(?!//))[^:\\\s\x00-\x20]+", href) is not None
