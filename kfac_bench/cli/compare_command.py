"""``kfac-bench compare``: a table, curves and a page of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from kfac_bench.cli.entry import Parser
from kfac_bench.errors import UsageError


def add_compare(commands: argparse._SubParsersAction[Parser]) -> None:
    """``kfac-bench compare``."""
    command = commands.add_parser("compare", help="table and curves of runs")
    command.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them")
    command.add_argument("--html", type=Path, help="write one self-contained page")
    command.add_argument("--svg", type=Path, help="write the figure alone")
    command.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    command.set_defaults(run_command=lambda o: compare(o.runs, o.html, o.svg, o.markdown))


def compare(runs: list[Path], html: Path | None, svg: Path | None, markdown: bool) -> int:
    """Print the table of the runs, and write what is asked for."""
    from rich.console import Console

    from kfac_bench import report

    found = report.compare(runs, html)
    if markdown:
        print(report.markdown_table(found.rows))
    else:
        Console().print(report.terminal_table(found.rows))
    for note in found.notes:
        print(note)
    if svg is not None:
        try:
            svg.write_text(report.figure_svg(found.settings), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{svg}: cannot be written ({error.strerror})") from None
        print(f"figure: {svg}")
    if html is not None:
        print(f"report: {html.resolve()}")
    return 0
