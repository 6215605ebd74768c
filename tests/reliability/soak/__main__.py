"""`make soak`: check that the memory, files and threads of a long run do not grow."""

from __future__ import annotations

import argparse
from pathlib import Path

from kfac_bench.cli.entry import Parser, exit_with
from kfac_bench.errors import UsageError
from kfac_bench.output import say


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments and run; return the exit code."""
    command = Parser(prog="python -m tests.reliability.soak", description=__doc__)
    command.add_argument("--steps", type=int, default=2000)
    command.add_argument("--ranks", type=int, default=2)
    command.add_argument("--runs-dir", type=Path, default=Path("runs/soak"))
    command.add_argument("overrides", nargs="*", help="options of kfac-train: model=resnet20 ...")
    return _soak(command.parse_args(arguments))


def _soak(options: argparse.Namespace) -> int:
    from tests.reliability.soak.command import Soak, soak

    if not (20 <= options.steps < 1 << 31 and 1 <= options.ranks <= 1024):
        raise UsageError(
            f"--steps {options.steps} --ranks {options.ranks}: use at least 20 steps on 1 to 1024 "
            "ranks"
        )
    asked = Soak(options.ranks, options.steps, options.runs_dir, options.overrides)
    verdict = soak(asked, say)
    title = f"{options.steps:,} steps on {options.ranks} ranks"
    say(verdict.table(title, [f"run: {asked.path}"]).markdown())
    if verdict.broken:
        say(f"limits broken: {'; '.join(verdict.broken)}")
    return 1 if verdict.broken else 0


if __name__ == "__main__":
    exit_with("soak", main)
