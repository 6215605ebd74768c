"""``python -m benchmarks.contest``: a contest of optimizers, in one sitting or in several."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from benchmarks.contest import contest_tables, setup, spaces, studies
from benchmarks.contest.contest_tables import ContestResult
from benchmarks.contest.result_store import ResultStore
from benchmarks.contest.sitting import Sitting, tasks_of
from kfac_bench.benchmark import schema
from kfac_bench.benchmark.grid import WorkSession
from kfac_bench.benchmark.performance_profile import profile_svg
from kfac_bench.benchmark.schema import Benchmark
from kfac_bench.cli import suite_command
from kfac_bench.cli.entry import Parser, command_line, exit_with, say_next
from kfac_bench.errors import UsageError
from kfac_bench.output import say
from kfac_bench.whole_files import around_marks, write_text

PROGRAM = "python -m benchmarks.contest"
ALTERNATIVE = "Share of tasks that each optimizer solves within a multiple of the best time"
"""The text of the figure for readers who cannot see it."""


def build_parser() -> Parser:
    """Return the parser of all subcommands."""
    parser = Parser(prog=PROGRAM, description="Tune, run and judge a contest of optimizers.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    _add_study(commands)
    _add_tables(commands)
    suite_command.add_run(commands)
    command = commands.choices["run"]
    command.add_argument("--results", type=Path, help="folder of packed results")
    command.set_defaults(
        run_command=lambda options: suite_command.run(options, open_sitting, PROGRAM)
    )
    return parser


def _add_study(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser(
        "study", help="tune each optimizer once in each study, and run the winners"
    )
    command.add_argument("benchmark", help="a benchmark with studies, such as contest")
    command.add_argument("--tasks", default="", help="only these tasks, with commas between them")
    command.add_argument("--runs-dir", help="where run directories go (default: runs/NAME)")
    command.add_argument("--results", type=Path, help="folder of packed results")
    suite_command.add_minutes(command)
    command.set_defaults(run_command=_study)
    command = commands.add_parser("spaces", help="print ranges that a pilot's trials centre")
    command.add_argument("benchmark", help="a benchmark with studies whose trials have run")
    command.add_argument("--results", type=Path, required=True, help="folder of packed results")
    command.set_defaults(run_command=_spaces)


def _add_tables(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser(
        "tables", help="print scores with intervals, from packed results only"
    )
    command.add_argument("benchmark", help="a benchmark with packed results, such as contest")
    command.add_argument("--results", type=Path, required=True, help="folder of packed results")
    command.add_argument(
        "--into",
        type=Path,
        help="Markdown page that gets the tables between its two marks, and the figure beside it",
    )
    command.add_argument("--svg", type=Path, help="write the figure of the profiles to this file")
    command.set_defaults(run_command=_tables)


def open_sitting(
    options: argparse.Namespace, benchmark: Benchmark, runs_dir: str, part: str = "table"
) -> WorkSession:
    """Return the session of a command: a sitting if it has ``--results``, else a time limit.

    Raises:
        UsageError: The options are wrong for this benchmark, or the store is damaged.
    """
    if options.results is None:
        return WorkSession(options.minutes)
    name = schema.stem(options.benchmark)
    store = ResultStore(options.results, name, part, tasks_of(benchmark))
    return Sitting(benchmark, Path(runs_dir), say, store, options.minutes)


def _study(options: argparse.Namespace) -> int:
    benchmark = schema.load(options.benchmark)
    setup.run_problems()
    runs_dir = options.runs_dir or f"runs/{schema.stem(options.benchmark)}"
    session = open_sitting(options, benchmark, runs_dir, studies.PART)
    tasks = options.tasks.split(",") if options.tasks else []
    is_whole = studies.run_studies(benchmark, runs_dir, session, say, tasks)
    words = [options.benchmark, *(["--results", options.results] if options.results else [])]
    if not is_whole or tasks:
        words += ["--runs-dir", options.runs_dir] if options.runs_dir else []
        words += ["--tasks", options.tasks] if not is_whole and tasks else []
        why = "the other tasks" if is_whole else "the runs that are missing"
        say_next(command_line(f"{PROGRAM} study", words), why)
    elif options.results:
        say_next(command_line(f"{PROGRAM} tables", words), "the scores")
    return 0


def _spaces(options: argparse.Namespace) -> int:
    benchmark = schema.load(options.benchmark)
    name = schema.stem(options.benchmark)
    store = ResultStore(options.results, name, studies.PART, tasks_of(benchmark))
    ranges = spaces.centred(benchmark, store)
    say(yaml.safe_dump(ranges, sort_keys=False, default_flow_style=None, width=100).rstrip())
    return 0


def _packed(name: str, results: Path) -> ContestResult:
    """Return the packed runs of a benchmark's table."""
    benchmark, name = schema.load(name), schema.stem(name)
    if benchmark.tuning is None or benchmark.axes.keys() != {"task", "optimizer"}:
        raise UsageError(
            f"{benchmark.title!r} has no studies of tasks and optimizers; kfac-bench report makes "
            "other tables"
        )
    store = ResultStore(results, name, studies.PART, tasks_of(benchmark))
    return contest_tables.load(benchmark, store)


def _tables(options: argparse.Namespace) -> int:
    result = _packed(options.benchmark, options.results)
    figures = [options.svg] if options.svg is not None else []
    text = "\n".join(table.markdown() for table in contest_tables.tables(result))
    if options.into is None:
        say(text)
    else:
        begin, end = contest_tables.begin_mark(options.benchmark), contest_tables.END
        before, after = around_marks(options.into, begin, end, "--into")
        figures.append(options.into.with_name(f"{schema.stem(options.benchmark)}.svg"))
        picture = f"![{ALTERNATIVE}]({figures[-1].name})"
        write_text(options.into, f"{before}{begin}\n\n{picture}\n\n{text}\n{end}{after}")
        say(f"into: {options.into}")
    if figures:
        drawn = profile_svg(contest_tables.medians(result.times()), "seconds")
        for path in figures:
            write_text(path, drawn)
            say(f"figure: {path}")
    words = [options.benchmark, "--results", options.results]
    if figures and contest_tables.missing(result):
        say_next(command_line(f"{PROGRAM} study", words), "the runs that are missing")
    elif not figures:
        words += ["--svg", f"{options.benchmark}.svg"]
        say_next(command_line(f"{PROGRAM} tables", words), "draws the figure")
    return 0


def main(arguments: list[str]) -> int:
    """Parse and run the command; return the exit code."""
    setup.enable()
    options = build_parser().parse_args(arguments)
    code: int = options.run_command(options)
    return code


if __name__ == "__main__":
    exit_with("contest", lambda: main(sys.argv[1:]))
