"""Reports on runs, made from their event files alone: Markdown, a terminal table, one HTML page.

Texts in event files are not trusted, so each output format escapes them in its own way.
:mod:`.comparison` reads the runs, :mod:`.tables` writes their numbers, :mod:`.curves` draws them,
and :mod:`.page` makes the page from its :mod:`.page_parts`.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from kfac_bench.report.comparison import Comparison as Comparison
from kfac_bench.report.comparison import folder_of, read
from kfac_bench.report.curves import curves_svg as curves_svg
from kfac_bench.report.curves import figure_svg as figure_svg
from kfac_bench.report.page import TITLE
from kfac_bench.report.page import html as html
from kfac_bench.report.page_parts import VerdictPage
from kfac_bench.report.tables import COLUMNS as COLUMNS
from kfac_bench.report.tables import Table
from kfac_bench.report.tables import cells as cells
from kfac_bench.report.tables import count as count
from kfac_bench.report.tables import markdown_table as markdown_table
from kfac_bench.report.tables import metric as metric
from kfac_bench.report.tables import seconds as seconds
from kfac_bench.report.tables import terminal_table as terminal_table
from kfac_bench.whole_files import write_text


def compare(
    paths: Iterable[Path],
    html_path: Path | None = None,
    tables: Sequence[Table] = (),
    title: str = TITLE,
    verdict: VerdictPage | None = None,
    refresh_s: int | None = None,
) -> Comparison:
    """Read the runs and write their page.

    Args:
        paths: Run directories, event files, or folders of runs.
        html_path: Where the HTML page goes; None: no page.
        tables: Tables to show on the page above the results of the runs, or below a verdict.
        title: The title of the page.
        verdict: The verdict that the page shows first.
        refresh_s: Seconds after which a browser loads the page again; None: never.

    Raises:
        UsageError: A path does not exist, no run can be read, or the page cannot be written.
    """
    folder = None if html_path is None else folder_of(html_path)
    comparison = read(paths)
    if html_path is not None:
        write_text(html_path, html(comparison, title, tables, folder, verdict, refresh_s))
    return comparison
