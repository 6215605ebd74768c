"""`kfac-bench runs`: list old runs, and remove the checkpoints that nobody needs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kfac_bench.cli.endings import command_line, say_next
from kfac_bench.cli.entry import Parser
from kfac_bench.output import counted, duration_text, say, size_text

if TYPE_CHECKING:
    from kfac_bench.record.run_list import ListedRun


def add_runs(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `kfac-bench runs list|prune`."""
    command = commands.add_parser("runs", help="list old runs, and remove old checkpoints")
    actions = command.add_subparsers(dest="action", required=True, parser_class=Parser)
    shown = actions.add_parser("list", help="list runs with their state, size and age")
    shown.set_defaults(run_command=_list)
    pruned = actions.add_parser(
        "prune", help="remove old checkpoints; the newest good and the best checkpoints stay"
    )
    pruned.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    pruned.add_argument(
        "--keep",
        type=int,
        default=1,
        metavar="N",
        help="newest good checkpoints that stay (default: 1)",
    )
    pruned.add_argument(
        "--older-than",
        type=float,
        default=0.0,
        metavar="DAYS",
        help="only runs whose last event is at least this many days ago (default: 0)",
    )
    pruned.set_defaults(run_command=_prune)
    for action in (shown, pruned):
        action.add_argument(
            "--runs-dir", type=Path, default=Path("runs"), help="folder of the runs (default: runs)"
        )


def _list(options: argparse.Namespace) -> int:
    from kfac_bench.record import run_list

    found = run_list.listed(options.runs_dir)
    # With the name that a run has by default, these columns fit a terminal of 80 characters.
    rows: list[tuple[str, ...]] = [("state", "step", "age", "size", "saved", "run")]
    rows += [_cells(run, options.runs_dir) for run in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
    total = sum(run.size_bytes for run in found)
    say(f"{counted(len(found), 'run')} in {options.runs_dir}, {size_text(total)}")
    words = ["--runs-dir", options.runs_dir]
    if any(run.checkpoints > 1 for run in found):
        say_next(command_line("kfac-bench runs prune --dry-run", words), "old checkpoints")
    elif found:
        say_next(command_line("kfac-bench compare", [options.runs_dir]))
    return 0


def _cells(run: ListedRun, root: Path) -> tuple[str, ...]:
    return (
        run.state,
        str(run.step),
        duration_text(run.age_s, units=1),
        size_text(run.size_bytes),
        str(run.checkpoints),
        str(run.path.relative_to(root)),
    )


def _prune(options: argparse.Namespace) -> int:
    from kfac_bench.record import run_list

    done = run_list.prune(
        options.runs_dir, options.keep, options.older_than, say, dry_run=options.dry_run
    )
    verb = "would free" if options.dry_run else "freed"
    checkpoints = counted(done.checkpoints, "checkpoint")
    say(f"{verb} {size_text(done.freed_bytes)}: {checkpoints} of {counted(done.runs, 'run')}")
    if done.left_alone:
        say(f"{counted(done.left_alone, 'run')} left alone, as said above")
    return 0
