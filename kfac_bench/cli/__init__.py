"""The console commands: they parse, call, and turn errors into one line and an exit code.

Exit codes: 0 for success, 1 if the run failed, 2 for bad input, 128 + n after signal n. The
commands import torch and other slow packages only after they know that the input is good.
"""

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from kfac_bench.cli import bench_command, data_command, plan_command, train_command
from kfac_bench.cli.entry import exit_with
from kfac_bench.config import named_variables


def train(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `kfac-train`."""
    _run("kfac-train", train_command.train, argv)


def bench(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `kfac-bench`."""
    _run("kfac-bench", bench_command.bench, argv)


def plan(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `kfac-plan`."""
    _run("kfac-plan", plan_command.plan, argv)


def data(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `kfac-data`."""
    _run("kfac-data", data_command.data, argv)


def _run(name: str, main: Callable[[list[str]], int], argv: Sequence[str] | None) -> NoReturn:
    arguments = list(sys.argv[1:] if argv is None else argv)
    named_variables.allow(arguments)
    exit_with(name, lambda: main(arguments))
