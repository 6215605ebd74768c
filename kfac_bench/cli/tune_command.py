"""``kfac-bench tune``: settings for each optimizer of a benchmark, with the same budget."""

from __future__ import annotations

import argparse
from pathlib import Path

from kfac_bench.cli.entry import Parser, command_line, say_next
from kfac_bench.cli.suite_command import add_minutes
from kfac_bench.output import say


def add_tune(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench tune``."""
    command = commands.add_parser("tune", help="tune each optimizer with the same budget")
    command.add_argument(
        "benchmark", help="a benchmark with a tuning section, such as demo, or its YAML file"
    )
    command.add_argument("--runs-dir", help="where run directories go (default: runs/NAME_tuning)")
    command.add_argument("--out", type=Path, required=True, help="folder for experiment files")
    command.add_argument(
        "--only", default="", help="tune only experiments whose names begin with this text"
    )
    add_minutes(command)
    command.set_defaults(run_command=tune)


def tune(options: argparse.Namespace) -> int:
    """Tune, and print the command that runs the benchmark with the settings."""
    from kfac_bench.benchmark import schema, tune
    from kfac_bench.benchmark.grid import WorkSession

    benchmark = schema.load(options.benchmark)
    runs_dir = options.runs_dir or f"runs/{schema.stem(options.benchmark)}_tuning"
    tune.check(benchmark, options.out)
    session = WorkSession(options.minutes)
    tune.tune(benchmark, runs_dir, options.out, say, options.only, session)
    say_next(command_line("kfac-bench run", [options.benchmark]), f"settings: {options.out}")
    return 0
