"""The console commands: parse, call, turn errors into one line and an exit code.

Exit codes: 0 done, 1 the run failed, 2 bad input, 128 + n stopped by signal n. Nothing heavy
is imported before the input is known to be good.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from kfac_bench.cli import bench_command, data_command, plan_command, train_command
from kfac_bench.cli.entry import exit_with


def train(argv: Sequence[str] | None = None) -> NoReturn:
    """``kfac-train``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    exit_with("kfac-train", lambda: train_command.train(arguments))


def bench(argv: Sequence[str] | None = None) -> NoReturn:
    """``kfac-bench``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    exit_with("kfac-bench", lambda: bench_command.bench(arguments))


def plan(argv: Sequence[str] | None = None) -> NoReturn:
    """``kfac-plan``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    exit_with("kfac-plan", lambda: plan_command.plan(arguments))


def data(argv: Sequence[str] | None = None) -> NoReturn:
    """``kfac-data``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    exit_with("kfac-data", lambda: data_command.data(arguments))
