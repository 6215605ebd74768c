"""``kfac-bench profile``: times to target with intervals, performance profiles and scores."""

from __future__ import annotations

import argparse
from pathlib import Path

from kfac_bench.cli.entry import Parser
from kfac_bench.errors import UsageError


def add_profile(commands: argparse._SubParsersAction[Parser]) -> None:
    """Declare it."""
    command = commands.add_parser("profile", help="how optimizers compare over several tasks")
    command.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them")
    command.add_argument("--steps", action="store_true", help="profiles of steps, not of seconds")
    command.add_argument("--svg", type=Path, help="write the figure")
    command.set_defaults(run_command=lambda o: profile(o.runs, o.steps, o.svg))


def profile(runs: list[Path], steps: bool, svg: Path | None) -> int:
    """Print the tables of the runs as Markdown; write the figure if asked for."""
    from kfac_bench import report
    from kfac_bench.benchmark import performance_profile

    found = report.compare(runs)
    unit = "steps" if steps else "seconds"
    times = performance_profile.medians(found.settings, steps=steps)
    if not times:
        raise UsageError("no run here has a target (trainer.target)")
    print(performance_profile.times_table(found.settings).markdown())
    title = f"Performance profiles, {unit} to target"
    print(performance_profile.table(times, title, unit).markdown())
    for note in found.notes:
        print(note)
    if svg is not None:
        from kfac_bench.benchmark.profile_figure import profile_svg

        try:
            svg.write_text(profile_svg(times, title, unit), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{svg}: cannot be written ({error.strerror})") from None
        print(f"figure: {svg}")
    return 0
