"""``kfac-bench list|run|report``: the tables and figures of papers, each from one YAML file."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kfac_bench.cli.entry import Parser, command_line, say_next
from kfac_bench.config.command_options import refuse_old_words, sbatch_options
from kfac_bench.errors import UsageError, printable
from kfac_bench.output import counted, say

if TYPE_CHECKING:
    import rich.table

    from kfac_bench.benchmark.grid import WorkSession
    from kfac_bench.benchmark.schema import Benchmark
    from kfac_bench.benchmark.suite import BenchmarkRow
    from kfac_bench.benchmark.write_reports import RowReport
    from kfac_bench.report.tables import Table

ALL = "all"


def add_list(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench list``."""
    command = commands.add_parser("list", help="list all benchmarks in groups")
    command.add_argument("--markdown", action="store_true", help="print the lists as Markdown")
    command.set_defaults(run_command=_list)


def add_run(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench run``."""
    command = commands.add_parser("run", help="run the cells of a benchmark and write its report")
    _add_words(command)
    add_minutes(command)
    command.add_argument(
        "--launcher",
        choices=("local", "slurm"),
        default="local",
        help="run on this machine (default), or submit jobs",
    )
    command.add_argument("--retry", action="store_true", help="run failed cells again")
    # A job of the previous wave passes --wave; users do not need it.
    command.add_argument("--wave", type=int, default=0, help=argparse.SUPPRESS)
    command.add_argument("--sbatch", default="", help="options of sbatch, for --launcher slurm")
    # Only benchmarks/contest keeps results, and adds this option.
    command.set_defaults(run_command=run, results=None)


def add_minutes(command: Parser) -> None:
    """Add the option of commands whose work may need more time than there is."""
    command.add_argument(
        "--minutes",
        type=float,
        help="start no run after this time, and say how many are left (0: only computed cells)",
    )


def add_report(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench report``."""
    command = commands.add_parser(
        "report", help="write the Markdown, SVG and HTML report of the cells that have run"
    )
    _add_words(command)
    command.add_argument(
        "--into",
        type=Path,
        help="Markdown document that lists the rows, between its two marks; the tables of each row "
        "are a page in the folder results beside the document",
    )
    command.add_argument(
        "--verdicts-into",
        type=Path,
        help="Markdown document that gets the tables of verdicts, between its two marks",
    )
    command.set_defaults(run_command=_report)


def _add_words(command: Parser) -> None:
    command.add_argument(
        "benchmark",
        help="a name from kfac-bench list, or a YAML file of your own; all: every table and figure "
        "of the papers",
    )
    command.add_argument(
        "words",
        nargs="*",
        default=[],  # otherwise argparse says that a word is required
        metavar="OPTION=VALUE",
        help="options of kfac-train for all runs",
    )
    command.add_argument("--profile", metavar="SIZE", help="smoke, cpu, one_gpu or paper")
    command.set_defaults(parser=command)
    command.add_argument(
        "--seeds", type=_seed, nargs="+", default=[], help="replace the benchmark's own seeds"
    )
    command.add_argument(
        "--only", default="", help="only cells whose labels, such as 'TASK SGD', begin like this"
    )
    command.add_argument("--runs-dir", help="where run directories go (default: runs/NAME)")


def _seed(text: str) -> int | str:
    """Return a seed, or an override that follows the seeds on the command line."""
    try:
        return text if "=" in text else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _separate_seeds(options: argparse.Namespace) -> None:
    """Move the overrides that argparse took for seeds to the other words."""
    options.words += [word for word in options.seeds if isinstance(word, str)]
    options.seeds = [seed for seed in options.seeds if isinstance(seed, int)]


def _list(options: argparse.Namespace) -> int:
    from kfac_bench.benchmark import catalog

    for group, entries in catalog.groups().items():
        say(f"## {group}\n" if options.markdown else group)
        for each in entries:
            source = f" ({each.source})" if each.source else ""
            sizes = f"; --profile {'|'.join(each.sizes)}" if each.sizes else ""
            if options.markdown:
                say(f"* `{each.name}`: {each.title}{source}{sizes}")
            else:
                for line in textwrap.wrap(
                    f"{each.name}: {each.title}{source}{sizes}",
                    initial_indent="  ",
                    subsequent_indent="      ",
                    width=max(40, shutil.get_terminal_size().columns),
                ):
                    say(line)
        say("")
    say_next("kfac-bench run demo", "three optimizers on handwritten digits, a few minutes")
    return 0


def _rows(options: argparse.Namespace, only: str) -> list[BenchmarkRow]:
    """Return the rows that the options name, with the cells of `only`."""
    from kfac_bench.benchmark import schema, suite

    _separate_seeds(options)
    overrides = options.words
    if any(word.lstrip("+").startswith("runs_dir=") for word in overrides):
        raise UsageError("runs_dir: write --runs-dir DIR, because the report goes there too")
    refuse_old_words(overrides, options.parser)
    for word in overrides:
        name, _, value = word.lstrip("+").partition("=")
        if name in ("run_id", "resume"):
            raise UsageError(f"{word}: each cell has a run directory of its own; leave it out")
        if name == "seed":
            raise UsageError(f"{word}: write --seeds {value}, because each cell has its own seed")
    profile, seeds = options.profile, options.seeds or None
    names = suite.names(options.benchmark, profile)
    if len(names) > 1 and options.runs_dir:
        raise UsageError(f"--runs-dir {options.runs_dir}: name one benchmark instead of {ALL}")
    rows = [suite.row(n, profile, overrides, options.runs_dir, seeds, only) for n in names]
    for row in rows:
        if overrides and row.cells:
            row.cells[0].config()  # A wrong override is reported before anything runs.
        elif schema.is_file(row.name):
            for cell in row.cells:
                if cell.seed == row.cells[0].seed:
                    cell.config()
    return rows


def run(
    options: argparse.Namespace,
    open_session: Callable[[argparse.Namespace, Benchmark, str], WorkSession] | None = None,
    program: str = "kfac-bench",
) -> int:
    """Run the cells, write the report, and print the next command.

    By default a session is only a time limit.
    """
    from kfac_bench.benchmark import suite
    from kfac_bench.benchmark.grid import WorkSession

    limits = [f"--{name}" for name in ("results", "minutes") if vars(options)[name] is not None]
    needs_one = [*limits, "--only"] if options.only else limits
    if options.benchmark == ALL and needs_one:
        raise UsageError(f"{' and '.join(needs_one)}: name one benchmark instead of {ALL}")
    sbatch = sbatch_options(options)
    rows = _rows(options, options.only)
    if options.launcher == "slurm":
        if limits:
            raise UsageError(f"--launcher slurm does not fit {' and '.join(limits)}")
        return _submit(rows, options, sbatch)
    began, failed = time.monotonic(), 0
    todo = [suite.cells_left(row, retry=options.retry) for row in rows]
    for number, row in enumerate(rows, start=1):
        if len(rows) > 1:
            spent, done = time.monotonic() - began, sum(todo[: number - 1])
            left_s = spent / done * sum(todo[number - 1 :]) if done else 0
            guess = f", about {left_s / 60:.0f} min left in all" if done else ""
            say(f"== {number}/{len(rows)} {row.name}: {row.benchmark.title}{guess}")
        try:
            if open_session is None:
                session = WorkSession(options.minutes)
            else:
                session = open_session(options, row.benchmark, str(row.folder))
            failed += suite.run(row, say, retry=options.retry, session=session)
            if suite.has_begun(suite.attempts(row)):  # The time may have been up before that.
                # --only chooses what runs now. The report keeps the cells that ran before.
                whole = _rows(options, only="")[0] if options.only else row
                _report_row(whole, brief=len(rows) > 1)
        except UsageError as error:
            if len(rows) == 1:
                raise
            failed += 1
            say(f"{row.name}: {error}")
    if len(rows) > 1:
        _report_all(rows, None)
        failures = counted(failed, "failed cell", none="no")
        say(f"{(time.monotonic() - began) / 60:.1f} min, {failures}")
    _say_what_next(rows, options, failed, program)
    return 1 if failed else 0


def _words(options: argparse.Namespace) -> list[object]:
    """Return the user's words after the benchmark, without ``--only`` and the launcher."""
    words = [*options.words]
    words += ["--profile", options.profile] if options.profile else []
    words += ["--seeds", *options.seeds] if options.seeds else []
    words += ["--runs-dir", options.runs_dir] if options.runs_dir else []
    return words


def _say_what_next(
    rows: Sequence[BenchmarkRow], options: argparse.Namespace, failed: int, program: str
) -> None:
    """Print the command that runs the other cells, or the one that draws the runs of one row."""
    from kfac_bench.benchmark import suite

    words = [options.benchmark, *_words(options)]
    words += ["--only", options.only] if options.only else []
    words += ["--results", options.results] if options.results else []
    left = sum(suite.cells_left(row, retry=False) for row in rows)
    if failed:
        say_next(command_line(f"{program} run", [*words, "--retry"]), "the failed cells again")
    elif left:
        say_next(command_line(f"{program} run", words), f"the {counted(left, 'cell')} left")
    elif len(rows) == 1 and suite.runs_of(suite.attempts(rows[0])):
        words = [rows[0].folder, "--svg", rows[0].folder / "curves.svg"]
        say_next(command_line("kfac-bench compare", words), "the curves of the runs")
    else:
        say_next("kfac-bench list", "other benchmarks")


def _report(options: argparse.Namespace) -> int:
    rows = _rows(options, options.only)
    from kfac_bench.benchmark import write_reports

    profile = rows[0].profile
    if len(rows) > 1:
        verdicts = _report_all(rows, options.into)
    else:
        written = _report_row(rows[0])
        verdicts = [] if written is None else written.verdicts
        if options.into:
            if written is None:
                name = rows[0].name
                raise UsageError(f"--into {options.into}: {name} has no table of quantities")
            for file in write_reports.into(options.into, [written], profile):
                say(f"into: {file}")
    if options.verdicts_into:
        write_reports.verdicts_into(options.verdicts_into, verdicts, profile)
        say(f"verdicts: {options.verdicts_into}")
    return 0


def _report_row(row: BenchmarkRow, *, brief: bool = False) -> RowReport | None:
    """Write the row's files, and print its table (unless `brief`) and the paths of the files.

    Returns:
        What was written; None for a row without quantities, whose runs are compared instead.
    """
    if row.overrides and not brief:
        words = " ".join(row.overrides)
        say(f"report of the runs with {words}; another report in {row.folder} is replaced")
    if not row.benchmark.quantities:
        _compare(row)
        return None
    from kfac_bench.benchmark import write_reports

    written = write_reports.write(row)
    if not brief:
        _show(written.tables[0])
        for table in written.verdicts:
            say(table.markdown())
    for file in written.files:
        say(f"{file.suffix[1:]}: {file}")
    return written


def _report_all(rows: Sequence[BenchmarkRow], into: Path | None) -> Sequence[Table]:
    """Write the reports of all rows, print the verdicts, and return their tables."""
    from kfac_bench.benchmark import write_reports
    from kfac_bench.benchmark.verdicts import verdict_tables

    written = []
    for row in rows:
        try:
            written.append(write_reports.write(row))
        except UsageError as error:
            say(str(error))
    verdicts = verdict_tables(rows)
    for table in verdicts:
        say(table.markdown())
    for file in write_reports.write_all(written, into, verdicts, rows[0].profile):
        say(f"all: {file}")
    return verdicts


def _compare(row: BenchmarkRow) -> None:
    """Report as ``kfac-bench compare``, for a benchmark without quantities."""
    from kfac_bench.benchmark import run_end, suite
    from kfac_bench.benchmark.suite import AttemptState
    from kfac_bench.cli import runs_command
    from kfac_bench.record.events import EVENTS_FILE

    found = suite.attempts(row)
    suite.refuse_new(row, found)
    began, new = [], 0
    for each in found:
        if (each.path / EVENTS_FILE).exists():
            try:
                run_end.ended(each.path)
                began.append(each.path)
            except UsageError as error:
                say(f"not in the table: {each.label}: {error}")
        elif each.state is AttemptState.NEW:
            new += 1
        else:
            say(f"not in the table, because it failed before its first event: {each.label}")
    if new:
        say(f"not run yet: {new} of {counted(len(found), 'cell')}")
    if began:
        runs_command.compare(began, row.folder / "report.html", None, False)


def _show(table: Table) -> None:
    """Print a table: drawn on a terminal, as Markdown into a pipe, whose lines have no limit."""
    if not sys.stdout.isatty():
        say(table.markdown())
        return
    from rich.console import Console

    Console().print(_terminal(table))
    for note in table.notes:
        say(f"* {note}")


def _terminal(table: Table) -> rich.table.Table:
    """Return the table for a rich console. Cells are text, never rich markup."""
    import rich.table
    from rich.text import Text

    from kfac_bench.report.tables import text

    shown = rich.table.Table(title=Text(printable(table.title)), title_justify="left")
    for column in table.columns:
        shown.add_column(Text(printable(column)), overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(printable(text(value))) for value in row))
    return shown


def _submit(
    rows: Sequence[BenchmarkRow], options: argparse.Namespace, sbatch: Sequence[str]
) -> int:
    from kfac_bench.benchmark import slurm_jobs

    words = [*map(str, _words(options))]
    failed = 0
    for row in rows:
        count, lines = slurm_jobs.submit_wave(
            row, words, options.wave, sbatch, only=options.only, retry=options.retry
        )
        failed += count
        for line in lines:
            say(line)
    return 1 if failed else 0
