"""The subcommands of ``kfac-bench`` for runs that have ended.

``compare`` shows a table and curves, ``runs`` lists runs and removes checkpoints, ``export`` writes
weights, ``profile`` compares optimizers over tasks, ``dashboard`` and ``wandb`` send runs to W&B.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from kfac_bench.cli.entry import Parser, command_line, say_next
from kfac_bench.errors import UsageError
from kfac_bench.output import counted, duration_text, say, size_text
from kfac_bench.record.runs import refuse_missing
from kfac_bench.whole_files import write_text

if TYPE_CHECKING:
    from kfac_bench.record.run_list import ListedRun


def add_compare(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench compare``."""
    command = commands.add_parser("compare", help="compare runs in a table, a figure and a page")
    command.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them")
    command.add_argument("--html", type=Path, help="write a self-contained page to this file")
    command.add_argument(
        "--watch",
        action="store_true",
        help="write the page of --html again while runs go on, until all have ended",
    )
    command.add_argument("--svg", type=Path, help="write the figure to this file")
    command.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    command.set_defaults(run_command=_compare)


def _compare(options: argparse.Namespace) -> int:
    if options.watch:
        if options.html is None:
            raise UsageError("--watch writes a page again and again: add --html report.html")
        refuse_missing(options.runs)
        from kfac_bench.report.watch import watch

        watch(options.runs, options.html, say)
    code = compare(options.runs, options.html, options.svg, options.markdown)
    words = options.runs
    if options.markdown:
        pass  # a pipe reads the table
    elif options.html is None:
        words = [*words, "--html", "report.html"]
        say_next(command_line("kfac-bench compare", words), "a page with the curves")
    elif options.svg is None:
        words = [*words, "--svg", "curves.svg"]
        say_next(command_line("kfac-bench compare", words), "the curves alone")
    else:
        words = [*words, "--markdown"]
        say_next(command_line("kfac-bench compare", words), "the table as Markdown")
    return code


def compare(runs: list[Path], html: Path | None, svg: Path | None, markdown: bool) -> int:
    """Print the table of the runs, and write the page and the figure if they have a path."""
    refuse_missing(runs)  # before the imports, which take a second
    from rich.console import Console

    from kfac_bench import report
    from kfac_bench.report.comparison import finding

    comparison = report.compare(runs, html)
    if markdown:
        say(report.markdown_table(comparison.rows))
    else:
        Console().print(report.terminal_table(comparison.rows))
    for note in comparison.notes:
        say(note)
    if not markdown:
        for task, settings in itertools.groupby(comparison.settings, key=lambda each: each.task):
            if sentence := finding(list(settings)):
                say(f"{task}: {sentence}")
    if svg is not None:
        write_text(svg, report.figure_svg(comparison.settings))
        say(f"figure: {svg}")
    if html is not None:
        say(f"report: {html.resolve()}")
    return 0


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


def add_profile(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench profile``."""
    command = commands.add_parser("profile", help="compare optimizers over several tasks")
    command.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them")
    command.add_argument("--steps", action="store_true", help="count steps instead of seconds")
    command.add_argument("--svg", type=Path, help="write the figure to this file")
    command.set_defaults(run_command=lambda o: profile(o.runs, o.steps, o.svg))


def profile(runs: list[Path], steps: bool, svg: Path | None) -> int:
    """Print the tables of the runs as Markdown, and write the figure if it has a path."""
    refuse_missing(runs)  # before the imports, which take a second
    from kfac_bench import report
    from kfac_bench.benchmark import performance_profile

    comparison = report.compare(runs)
    unit = "steps" if steps else "seconds"
    times = performance_profile.medians(comparison.settings, steps=steps)
    if not times:
        raise UsageError("none of these runs has a target; train with trainer.target=VALUE")
    say(performance_profile.times_table(comparison.settings).markdown())
    title = f"Performance profiles, {unit} to target"
    say(performance_profile.table(times, title, unit).markdown())
    for note in (*performance_profile.not_run(times), *comparison.notes):
        say(note)
    if svg is not None:
        write_text(svg, performance_profile.profile_svg(times, unit))
        say(f"figure: {svg}")
    else:
        words = [*runs, *(["--steps"] if steps else []), "--svg", "profile.svg"]
        say_next(command_line("kfac-bench profile", words), "draws the profiles")
    return 0


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

    from kfac_bench.dashboard import views

    shown = views.scope_of_runs(options.runs, options.project, options.entity)
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
