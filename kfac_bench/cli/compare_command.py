"""``kfac-bench compare``: a table, the curves and a page of runs."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from kfac_bench.cli.entry import Parser, command_line, say_next
from kfac_bench.output import say
from kfac_bench.record.runs import refuse_missing
from kfac_bench.whole_files import write_text


def add_compare(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench compare``."""
    command = commands.add_parser("compare", help="compare runs in a table, a figure and a page")
    command.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them")
    command.add_argument("--html", type=Path, help="write a self-contained page to this file")
    command.add_argument("--svg", type=Path, help="write the figure to this file")
    command.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    command.set_defaults(run_command=_compare)


def _compare(options: argparse.Namespace) -> int:
    code = compare(options.runs, options.html, options.svg, options.markdown)
    words = options.runs
    if options.markdown:
        pass  # a pipe reads the table
    elif options.html is None:
        words = [*words, "--html", "report.html"]
        say_next(command_line("kfac-bench compare", words), "a page with the curves")
    elif options.svg is None:
        words = [*words, "--svg", "curves.svg"]
        say_next(command_line("kfac-bench compare", words), "the curves alone")
    else:
        words = [*words, "--markdown"]
        say_next(command_line("kfac-bench compare", words), "the table as Markdown")
    return code


def compare(runs: list[Path], html: Path | None, svg: Path | None, markdown: bool) -> int:
    """Print the table of the runs, and write the page and the figure if they have a path."""
    refuse_missing(runs)  # before the imports, which take a second
    from rich.console import Console

    from kfac_bench import report
    from kfac_bench.report.comparison import finding

    comparison = report.compare(runs, html)
    if markdown:
        say(report.markdown_table(comparison.rows))
    else:
        Console().print(report.terminal_table(comparison.rows))
    for note in comparison.notes:
        say(note)
    if not markdown:
        for task, settings in itertools.groupby(comparison.settings, key=lambda each: each.task):
            if sentence := finding(list(settings)):
                say(f"{task}: {sentence}")
    if svg is not None:
        write_text(svg, report.figure_svg(comparison.settings))
        say(f"figure: {svg}")
    if html is not None:
        say(f"report: {html.resolve()}")
    return 0
