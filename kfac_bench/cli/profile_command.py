"""``kfac-bench profile``: times to target with intervals, performance profiles and scores."""

from __future__ import annotations

import argparse
from pathlib import Path

from kfac_bench.cli.endings import command_line, say_next
from kfac_bench.cli.entry import Parser
from kfac_bench.errors import UsageError
from kfac_bench.output import say
from kfac_bench.record.runs import refuse_missing
from kfac_bench.record.text_file import write_text


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
        from kfac_bench.benchmark.performance_profile import profile_svg

        write_text(svg, profile_svg(times, unit))
        say(f"figure: {svg}")
    else:
        words = [*runs, *(["--steps"] if steps else []), "--svg", "profile.svg"]
        say_next(command_line("kfac-bench profile", words), "draws the profiles")
    return 0
