"""``kfac-bench dashboard`` and ``kfac-bench wandb``: what W&B shows, and gets."""

from __future__ import annotations

import argparse
from pathlib import Path

from kfac_bench.cli.entry import Parser, say
from kfac_bench.errors import UsageError


def add_dashboard(commands: argparse._SubParsersAction[Parser]) -> None:
    """``kfac-bench dashboard push|dry-run``."""
    command = commands.add_parser("dashboard", help="W&B workspace and report, as code")
    command.add_argument("what", choices=("push", "dry-run"), help="dry-run writes JSON alone")
    command.add_argument(
        "runs", nargs="*", type=Path, help="runs to show, with tables of them (all, without)"
    )
    command.add_argument("--project", help="W&B project (that of the runs)")
    command.add_argument("--entity", help="W&B user or team (that of the runs, or your own)")
    command.add_argument(
        "--out", default="dashboard.json", help="JSON file of dry-run (dashboard.json); - prints it"
    )
    command.set_defaults(run_command=_dashboard)


def _dashboard(options: argparse.Namespace) -> int:
    import json

    from kfac_bench.dashboard import scope, views

    found = scope.of_runs(options.runs, options.project, options.entity)
    if options.what == "push":
        for line in views.push(found):
            say(line)
        return 0
    text = json.dumps(views.as_json(found), indent=1) + "\n"
    if options.out == "-":
        print(text, end="")
        return 0
    try:
        Path(options.out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {options.out}: cannot be written ({error.strerror})") from None
    for line in views.describe(found):
        say(line)
    say(f"as JSON: {options.out}; kfac-bench dashboard push creates them")
    return 0


def add_wandb(commands: argparse._SubParsersAction[Parser]) -> None:
    """``kfac-bench wandb upload``."""
    command = commands.add_parser("wandb", help="send event files to W&B")
    actions = command.add_subparsers(dest="action", required=True, parser_class=Parser)
    upload = actions.add_parser("upload", help="runs that W&B lacks, or has in part")
    upload.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them")
    upload.add_argument("--project", help="W&B project (that of each run)")
    upload.add_argument("--entity", help="W&B user or team (that of each run)")
    upload.add_argument(
        "--offline", action="store_true", help="write offline runs, for wandb sync, beside each run"
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
