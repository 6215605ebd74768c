"""``kfac-bench dashboard`` and ``kfac-bench wandb``: W&B's dashboard, and uploads to W&B."""

from __future__ import annotations

import argparse
from pathlib import Path

from kfac_bench.cli.entry import Parser
from kfac_bench.output import say
from kfac_bench.whole_files import write_text


def add_dashboard(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench dashboard push|dry-run``."""
    command = commands.add_parser("dashboard", help="create a W&B workspace and a W&B report")
    command.add_argument(
        "what", choices=("push", "dry-run"), help="push: save on W&B's server; dry-run: as JSON"
    )
    command.add_argument(
        "runs", nargs="*", type=Path, help="runs to show, with their tables (default: all runs)"
    )
    command.add_argument("--project", help="W&B project (default: that of the runs)")
    command.add_argument("--entity", help="W&B user or team (default: that of the runs, or yours)")
    command.add_argument(
        "--out",
        default="dashboard.json",
        help="JSON file of dry-run (default: dashboard.json); - prints the JSON",
    )
    command.set_defaults(run_command=_dashboard)


def _dashboard(options: argparse.Namespace) -> int:
    import json

    from kfac_bench.dashboard import scope, views

    shown = scope.of_runs(options.runs, options.project, options.entity)
    if options.what == "push":
        for line in views.push(shown):
            say(line)
        return 0
    text = json.dumps(views.as_json(shown), indent=1) + "\n"
    if options.out == "-":
        say(text, end="")
        return 0
    write_text(Path(options.out), text, f"--out {options.out}")
    for line in views.describe(shown):
        say(line)
    say(f"as JSON: {options.out}; kfac-bench dashboard push creates them")
    return 0


def add_wandb(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench wandb upload``."""
    command = commands.add_parser("wandb", help="send event files to W&B")
    actions = command.add_subparsers(dest="action", required=True, parser_class=Parser)
    upload = actions.add_parser("upload", help="send the points after the last one that W&B has")
    upload.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them")
    upload.add_argument("--project", help="W&B project (default: that of each run)")
    upload.add_argument("--entity", help="W&B user or team (default: that of each run)")
    upload.add_argument(
        "--offline",
        action="store_true",
        help="write offline runs into the run directories; wandb sync sends them later",
    )
    command.set_defaults(run_command=_upload)


def _upload(options: argparse.Namespace) -> int:
    from kfac_bench.dashboard import upload

    failed = 0
    for line, good in upload.upload(
        options.runs, options.project, options.entity, offline=options.offline
    ):
        say(line)
        failed += not good
    return 1 if failed else 0
