"""Reports on runs, from their event files alone: Markdown, terminal table, one HTML page.

Texts in event files are not trusted: each output format escapes them in its own way.
:mod:`.comparison` reads the runs, :mod:`.words` writes their numbers, :mod:`.page` makes the page
of :mod:`.charts` (what its curves are drawn of) and :mod:`.grid` (tables to sort).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from kfac_bench.report.comparison import Comparison as Comparison
from kfac_bench.report.comparison import folder_of, read, write
from kfac_bench.report.curves import curves_svg as curves_svg
from kfac_bench.report.curves import figure_svg as figure_svg
from kfac_bench.report.page import TITLE
from kfac_bench.report.page import html as html
from kfac_bench.report.tables import Table
from kfac_bench.report.words import COLUMNS as COLUMNS
from kfac_bench.report.words import between as between
from kfac_bench.report.words import cells as cells
from kfac_bench.report.words import count as count
from kfac_bench.report.words import markdown_table as markdown_table
from kfac_bench.report.words import metric as metric
from kfac_bench.report.words import seconds as seconds
from kfac_bench.report.words import terminal_table as terminal_table


def compare(
    paths: Iterable[Path],
    html_path: Path | None = None,
    tables: Sequence[Table] = (),
    title: str = TITLE,
) -> Comparison:
    """Read the runs at ``paths`` (run directories, event files, or folders of runs).

    Writes the HTML page to ``html_path`` if given, all of it or nothing; ``tables`` stand on it
    above what is found here. Raises :class:`UsageError` for a path that is not there, where no
    run can be read, or for a page that cannot be written.
    """
    folder = None if html_path is None else folder_of(html_path)
    found = read(paths)
    if html_path is not None:
        write(html_path, html(found, title, tables, folder))
    return found
