"""``kfac-bench tune``: settings for each optimizer of a benchmark, with the same budget.

The contest of optimizers is not in the package: its old commands name ``python -m
benchmarks.contest``, which runs in a clone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kfac_bench.cli.entry import Parser, command_line, say_next
from kfac_bench.cli.suite_command import add_session_options, time_limit
from kfac_bench.errors import UsageError
from kfac_bench.output import say

if TYPE_CHECKING:
    from kfac_bench.benchmark.grid import WorkSession
    from kfac_bench.benchmark.schema import Benchmark

MOVED = {"contest": "tables", "self-tune": "self-tune"}
"""Commands that have left the package, with their words after ``python -m benchmarks.contest``."""


def add_tune(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench tune``."""
    command = commands.add_parser("tune", help="tune each optimizer with the same budget")
    add_tuning_options(command, "folder for experiment files")
    command.add_argument(
        "--only", default="", help="tune only experiments whose names begin with this text"
    )
    command.set_defaults(run_command=tune)


def add_tuning_options(command: Parser, out: str) -> None:
    """Add the common options of commands that read or make the trials of a tuning."""
    command.add_argument(
        "benchmark", help="a benchmark with a tuning section, such as demo, or its YAML file"
    )
    command.add_argument("--runs-dir", help="where run directories go (default: runs/NAME_tuning)")
    command.add_argument("--out", type=Path, required=True, help=out)
    add_session_options(command)


def refuse_moved(arguments: list[str]) -> None:
    """Raise `UsageError` for a command that has left the package. The line names the new one."""
    name = arguments[0] if arguments else ""
    if name in MOVED:
        command = command_line(f"python -m benchmarks.contest {MOVED[name]}", arguments[1:])
        raise UsageError(
            f"kfac-bench {name} is not in the package; in a clone of the repository write {command}"
        )


def tuning_session(
    options: argparse.Namespace,
    open_session: Callable[[argparse.Namespace, Benchmark, str, str], WorkSession],
) -> tuple[Benchmark, str, WorkSession]:
    """Return the benchmark, the folder of its trials, and the session that a command opens."""
    from kfac_bench.benchmark import schema, tune

    benchmark = schema.load(options.benchmark)
    runs_dir = options.runs_dir or f"runs/{schema.stem(options.benchmark)}_tuning"
    tune.check(benchmark, options.out)
    return benchmark, runs_dir, open_session(options, benchmark, "tuning", runs_dir)


def tune(
    options: argparse.Namespace,
    open_session: Callable[[argparse.Namespace, Benchmark, str, str], WorkSession] = time_limit,
    program: str = "kfac-bench",
) -> int:
    """Tune, and print the command that runs the benchmark with the settings."""
    from kfac_bench.benchmark import tune

    benchmark, runs_dir, session = tuning_session(options, open_session)
    tune.tune(benchmark, runs_dir, options.out, say, options.only, session)
    say_next(command_line(f"{program} run", [options.benchmark]), f"settings: {options.out}")
    return 0
