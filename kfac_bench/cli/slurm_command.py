"""``kfac-bench slurm``: the batch scripts of the package, as files that a user can change."""

from __future__ import annotations

import argparse
from pathlib import Path

from kfac_bench.cli.entry import Parser
from kfac_bench.errors import UsageError
from kfac_bench.output import say

DEFAULT_FOLDER = Path("slurm")
"""Folder below the current one in which a batch script looks for common.sh."""


def add_slurm(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench slurm``."""
    command = commands.add_parser("slurm", help="copy the batch scripts for Slurm into a folder")
    command.add_argument(
        "--to",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the scripts, such as slurm",
    )
    command.set_defaults(run_command=lambda o: copy_scripts(o.to))


def copy_scripts(folder: Path) -> int:
    """Copy the batch scripts and say how to submit one. Files that are there stay as they are.

    Raises:
        UsageError: A file of the folder differs from the script of its name, or the folder cannot
            be written. Nothing is copied if a file differs.
    """
    from kfac_bench.benchmark.slurm_jobs import SCRIPTS

    # site.sh has the settings of one cluster, so it belongs to no other folder.
    scripts = {p.name: p.read_bytes() for p in SCRIPTS.iterdir() if p.name != "site.sh"}
    try:
        for name, content in scripts.items():
            path = folder / name
            if path.exists() and path.read_bytes() != content:
                raise UsageError(
                    f"{path} is there and differs: move it away, or name another folder"
                )
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in scripts.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise UsageError(f"--to {folder}: cannot be written ({error.strerror})") from None
    say(f"{len(scripts)} batch scripts are in {folder}")
    if folder.absolute() != DEFAULT_FOLDER.absolute():
        say(f"first: export KFAC_SLURM={folder.absolute()}")
    say(f"test the cluster: sbatch {folder / 'smoke.sbatch'} experiment=kaisa_unet_lgg")
    return 0
