"""`kfac-bench export`: a run's weights for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from kfac_bench.cli.endings import command_line, say_next
from kfac_bench.cli.entry import Parser
from kfac_bench.errors import UsageError
from kfac_bench.output import say


def add_export(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `kfac-bench export` to the commands."""
    command = commands.add_parser("export", help="write a run's weights as safetensors")
    command.add_argument("run", type=Path, help="run directory, or one checkpoint")
    command.add_argument(
        "--out", type=Path, help="the file to write (default: RUN/model.safetensors)"
    )
    command.add_argument(
        "--best", action="store_true", help="take the best kept checkpoint, not the newest"
    )
    command.set_defaults(run_command=_export)


def _export(options: argparse.Namespace) -> int:
    if not options.run.exists():  # before the import of torch
        raise UsageError(f"{options.run} does not exist; give a run directory or a checkpoint")
    from kfac_bench.training.weights import SAFETENSORS, export

    for line in export(options.run, options.out, best=options.best):
        say(line)
    code = "import sys, safetensors.torch as s; print(s.load_file(sys.argv[1]).keys())"
    file = options.out or (options.run if options.run.is_dir() else Path()) / SAFETENSORS
    say_next(command_line("python", ["-c", code, file]), "the names of the weights")
    return 0
