"""``kfac-bench tune|self-tune|contest``: a contest of optimizers, in one sitting or in several."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kfac_bench.cli.endings import command_line, say_next
from kfac_bench.cli.entry import Parser
from kfac_bench.cli.suite_command import add_sitting_options
from kfac_bench.output import say
from kfac_bench.record.text_file import around_marks, write_text

if TYPE_CHECKING:
    from kfac_bench.benchmark.contest_tables import ContestResult
    from kfac_bench.benchmark.schema import Benchmark
    from kfac_bench.benchmark.sitting import Sitting

_ALTERNATIVE = "Share of tasks that each optimizer solves within a multiple of the best time"
"""What the figure shows, for readers who cannot see it."""


def add_tune(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench tune``."""
    command = commands.add_parser("tune", help="tune each optimizer with the same budget")
    _add_shared(command, "folder for experiment files")
    command.add_argument(
        "--only", default="", help="tune only experiments whose names begin with this text"
    )
    command.set_defaults(run_command=_tune)


def add_self_tune(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench self-tune``."""
    command = commands.add_parser(
        "self-tune", help="choose one setting of each optimizer for all tasks, from its trials"
    )
    _add_shared(command, "folder for the benchmark file NAME_self_tuned.yaml")
    command.set_defaults(run_command=_self_tune)


def _add_shared(command: Parser, out: str) -> None:
    command.add_argument("benchmark", help="a benchmark with a tuning section, such as embedded")
    command.add_argument("--runs-dir", help="where run directories go (default: runs/NAME_tuning)")
    command.add_argument("--out", type=Path, required=True, help=out)
    add_sitting_options(command)


def add_contest(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench contest``."""
    command = commands.add_parser(
        "contest", help="print scores with intervals, from packed results only"
    )
    command.add_argument("benchmark", help="a benchmark with packed results, such as contest")
    command.add_argument("--results", type=Path, required=True, help="folder of packed results")
    command.add_argument(
        "--into",
        type=Path,
        help="Markdown page that gets the tables between its two marks, and the figure beside it",
    )
    command.add_argument(
        "--than",
        metavar="BENCHMARK",
        help="add a table that compares the seconds with those of another benchmark",
    )
    command.add_argument("--svg", type=Path, help="write the figure of the profiles to this file")
    command.set_defaults(run_command=_contest)


def _tuning_sitting(options: argparse.Namespace) -> tuple[Benchmark, str, Sitting]:
    """Return the benchmark, the folder of its trials, and the sitting that a command opens."""
    from kfac_bench.benchmark import schema, tune
    from kfac_bench.benchmark.sitting import open_sitting

    name, results, minutes = options.benchmark, options.results, options.minutes
    benchmark = schema.load(name)
    runs_dir = options.runs_dir or f"runs/{name}_tuning"
    tune.check(benchmark, options.out)
    sitting = open_sitting(name, benchmark, "tuning", runs_dir, say, results, minutes)
    return benchmark, runs_dir, sitting


def _tune(options: argparse.Namespace) -> int:
    from kfac_bench.benchmark import tune

    benchmark, runs_dir, sitting = _tuning_sitting(options)
    tune.tune(benchmark, runs_dir, options.out, say, options.only, sitting)
    say_next(command_line("kfac-bench run", [options.benchmark]), f"settings: {options.out}")
    return 0


def _self_tune(options: argparse.Namespace) -> int:
    from kfac_bench.benchmark import self_tune

    benchmark, runs_dir, sitting = _tuning_sitting(options)
    name, out = options.benchmark, options.out
    if self_tune.self_tune(name, benchmark, runs_dir, out, say, sitting):
        words = [f"{name}{self_tune.SUFFIX}"]
        say_next(command_line("kfac-bench run", words), f"settings: {out}")
    else:
        words = [name, "--results", options.results, "--out", out]
        words += ["--runs-dir", options.runs_dir] if options.runs_dir else []
        say_next(command_line("kfac-bench self-tune", words), "continues")
    return 0


def _packed(name: str, results: Path) -> ContestResult:
    """Return the packed runs of a benchmark's table."""
    from kfac_bench.benchmark import contest_tables, schema
    from kfac_bench.benchmark.result_store import ResultStore
    from kfac_bench.benchmark.sitting import tasks_of

    benchmark = schema.load(name)
    return contest_tables.load(benchmark, ResultStore(results, name, "table", tasks_of(benchmark)))


def _contest(options: argparse.Namespace) -> int:
    from kfac_bench.benchmark import contest_comparison, contest_tables

    result = _packed(options.benchmark, options.results)
    figures = [options.svg] if options.svg is not None else []
    made = contest_tables.tables(result)
    if options.than is not None:
        other = _packed(options.than, options.results)
        made.append(contest_comparison.compared(result, options.benchmark, other, options.than))
    text = "\n".join(table.markdown() for table in made)
    if options.into is None:
        say(text)
    else:
        begin, end = contest_tables.begin_mark(options.benchmark), contest_tables.END
        before, after = around_marks(options.into, begin, end, "--into")
        figures.append(options.into.with_name(f"{options.benchmark}.svg"))
        picture = f"![{_ALTERNATIVE}]({figures[-1].name})"
        write_text(options.into, f"{before}{begin}\n\n{picture}\n\n{text}\n{end}{after}")
        say(f"into: {options.into}")
    if figures:
        from kfac_bench.benchmark.performance_profile import profile_svg
        from kfac_bench.benchmark.score_interval import medians

        drawn = profile_svg(medians(result.times()), "seconds")
        for path in figures:
            write_text(path, drawn)
            say(f"figure: {path}")
    words = [options.benchmark, "--results", options.results]
    if figures:
        say_next(command_line("kfac-bench run", words), "the runs that are missing")
    else:
        words += ["--svg", f"{options.benchmark}.svg"]
        say_next(command_line("kfac-bench contest", words), "draws the figure")
    return 0
