"""`make soak`: check that memory, files, threads, disk and step time of a long run do not grow."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from kfac_bench.cli.entry import Parser, exit_with
from kfac_bench.errors import UsageError
from kfac_bench.output import say


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments and run; return the exit code."""
    command = Parser(prog="python -m tests.reliability.soak", description=__doc__)
    length = command.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=2000, help="length of the run (2000)")
    length.add_argument("--minutes", type=float, help="length of the run in minutes of training")
    command.add_argument("--ranks", type=int, default=2)
    command.add_argument("--runs-dir", type=Path, default=Path("runs/soak"))
    command.add_argument("overrides", nargs="*", help="options of kfac-train: model=resnet20 ...")
    return _soak(command.parse_args(arguments))


def _soak(options: argparse.Namespace) -> int:
    from tests.reliability.soak.command import UNLIMITED, Soak, soak

    if not (20 <= options.steps < UNLIMITED and 1 <= options.ranks <= 1024):
        raise UsageError(
            f"--steps {options.steps} --ranks {options.ranks}: use at least 20 steps on 1 to 1024 "
            "ranks"
        )
    if options.minutes is not None and not 0 < options.minutes < math.inf:
        raise UsageError(f"--minutes {options.minutes:g}: use a positive number")
    steps = options.steps if options.minutes is None else UNLIMITED
    asked = Soak(options.ranks, options.runs_dir, steps, options.minutes, options.overrides)
    verdict = soak(asked, say)
    title = f"{asked.length} on {options.ranks} ranks"
    say(verdict.table(title, [f"run: {asked.path}"]).markdown())
    if verdict.broken:
        say(f"limits broken: {'; '.join(verdict.broken)}")
    return 1 if verdict.broken else 0


if __name__ == "__main__":
    exit_with("soak", main)
