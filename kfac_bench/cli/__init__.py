"""The console commands: they parse, call, and turn errors into one line and an exit code.

Exit codes: 0 for success, 1 if the run failed, 2 for bad input, 128 + n after signal n. The
commands import torch and other slow packages only after they know that the input is good. This
file needs no package, so that a command without its extra can say what to install.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kfac_bench.cli.entry import exit_with


def train(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `kfac-train`."""
    _run("train", argv)


def bench(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `kfac-bench`."""
    _run("bench", argv)


def plan(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `kfac-plan`."""
    _run("plan", argv)


def data(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `kfac-data`."""
    _run("data", argv)


def _sleep_sooner() -> None:
    """Let threads that wait for each other sleep sooner; torch reads the variable when it loads.

    By default GNU OpenMP spins 300,000 times before it sleeps. If another process uses the core,
    it spins in place of the thread it waits for (docs/lab/what_was_tried.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _run(command: str, argv: Sequence[str] | None) -> NoReturn:
    arguments = list(sys.argv[1:] if argv is None else argv)
    _sleep_sooner()

    def main() -> int:
        from kfac_bench.config import named_variables

        named_variables.allow(arguments)
        module = importlib.import_module(f"kfac_bench.cli.{command}_command")
        code: int = getattr(module, command)(arguments)
        return code

    exit_with(f"kfac-{command}", main)
