"""``kfac-bench soak``: whether a long run stays level."""

from __future__ import annotations

import argparse
from pathlib import Path

from kfac_bench.cli.entry import Parser, say
from kfac_bench.errors import UsageError


def add_soak(commands: argparse._SubParsersAction[Parser]) -> None:
    """``kfac-bench soak``."""
    command = commands.add_parser("soak", help="train for long; memory, files and threads by rank")
    command.add_argument("--steps", type=int, default=2000)
    command.add_argument("--ranks", type=int, default=2)
    command.add_argument("--runs-dir", type=Path, default=Path("runs/soak"))
    command.add_argument("overrides", nargs="*", help="of kfac-train: model=resnet20 ...")
    command.set_defaults(run_command=_soak)


def _soak(options: argparse.Namespace) -> int:
    from kfac_bench.soak.command import Soak, soak

    if not (20 <= options.steps < 1 << 31 and 1 <= options.ranks <= 1024):
        raise UsageError("soak: at least 20 steps, on 1 to 1024 ranks")
    asked = Soak(options.ranks, options.steps, options.runs_dir, options.overrides)
    verdict = soak(asked, say)
    title = f"{options.steps:,} steps on {options.ranks} ranks"
    say(verdict.table(title, [f"run: {asked.path}"]).markdown())
    if verdict.broken:
        say(f"not level: {'; '.join(verdict.broken)}")
    return 1 if verdict.broken else 0
