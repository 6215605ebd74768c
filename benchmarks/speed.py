"""Measure step time and memory of K-FAC relative to SGD. Run: python benchmarks/speed.py --help."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# A file that is started directly does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import intervals, measure, memory, tables
from benchmarks.measure import PRECISIONS, Case
from benchmarks.models import NAMES, Size
from kfac_bench.errors import UsageError
from kfac_bench.training import environment
from kfac_bench.whole_files import around_marks, write_text

SETTINGS = ((1, 10), (10, 100))
"""Pairs of steps between factor updates and steps between decompositions."""
REAL = ("resnet32", "encoder")
"""Models whose whole intervals take minutes rather than hours on a CPU."""
KEPT = Path(__file__).parent / "results"
"""The folder of the kept measurements: ``speed_*.json``."""
BEGIN = "<!-- made by benchmarks/speed.py --into -->"
END = "<!-- end of what benchmarks/speed.py made -->"


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` instead of ending the process."""
        raise UsageError(message)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options, so that bad input fails before anything is measured."""
    parser = Parser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--models", type=words, default=list(NAMES), help="some of " + ",".join(NAMES))
    add("--batch", type=whole, help="examples per step; None is the model's usual number")
    add("--methods", type=words, default=["eigen", "inverse"], help="methods of KFAC")
    add("--rounds", type=whole, default=9, help="number of rounds for each median")
    add("--real", action="store_true", help=f"also run whole intervals of {', '.join(REAL)}")
    add("--intervals", type=whole, default=2, help="number of intervals of --real")
    add("--no-memory", action="store_true", help="do not measure peak memory")
    add("--precision", choices=PRECISIONS, default="fp32")
    add("--kfac", action="append", default=[], metavar="KEY=VALUE", help="a keyword for KFAC")
    add("--threads", type=whole, default=1, help="threads on the CPU")
    add("--clock", choices=("wall", "cpu"), default="wall", help="cpu is processor time")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--out", type=Path, default=Path("benchmarks/results/speed.json"))
    add("--quick", action="store_true", help="run the code once with tiny models")
    add("--into", type=Path, metavar="PAGE", help="write tables of results/speed_*.json; then end")
    options = parser.parse_args(arguments)
    unknown = [m for m in options.models if m not in NAMES]
    if unknown:
        raise UsageError(f"unknown model {unknown[0]!r}: choose from {', '.join(NAMES)}")
    for name in ("models", "methods"):
        if not getattr(options, name):
            raise UsageError(f"--{name} names nothing")
    options.kfac = dict(keyword(text) for text in options.kfac)
    check_device(options.device)
    if options.clock == "cpu" and (options.device != "cpu" or options.threads > 1):
        raise UsageError("--clock cpu is for one thread on the CPU")
    # KFAC refuses bad keywords now, and not after minutes.
    for method in options.methods:
        measure.Variant(Case("encoder", Size(quick=True), kfac=options.kfac), method)
    if not options.into:
        make_parent(options.out)
    if options.quick:
        options.rounds = min(options.rounds, 2)
    return options


def words(text: str) -> list[str]:
    """Split names at commas, without repetitions."""
    return list(dict.fromkeys(w for w in re.split(r"[,\s]+", text) if w))


def keyword(text: str) -> tuple[str, Any]:
    """Split KEY=VALUE and read the value as YAML."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UsageError(f"--kfac {text}: not KEY=VALUE")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UsageError(f"--kfac {text}: the value is not YAML") from error


def whole(text: str) -> int:
    """Read a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def check_device(device: str) -> None:
    """Raise `UsageError` if the device is missing."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device: torch sees none; --device cpu runs without")


def make_parent(path: Path) -> None:
    """Raise `UsageError` if the file cannot be written: now, not after the measurement."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def header(device: str, quick: bool) -> dict[str, Any]:
    """Return the conditions of the measurement, with an empty list of models."""
    machine = environment.describe()
    with suppress(metadata.PackageNotFoundError):
        machine["versions"]["transformers"] = metadata.version("transformers")
    date = datetime.now(UTC).date().isoformat()
    found = {"machine": machine, "date": date, "device": device, "clock": "wall", "quick": quick}
    return found | {"models": []}


def measure_case(
    case: Case,
    methods: Sequence[str],
    settings: Sequence[tuple[int, int]],
    rounds: int,
    progress: Progress,
    *,
    budget_s: float = float("inf"),
) -> dict[str, Any]:
    """Time the kinds of steps, and return the model's entry without intervals and memory."""
    measure.set_precision(case.precision)
    what = f"{case.name} {case.precision}"
    task = progress.add_task(f"{what}: warming up", total=rounds)

    def on_round(done: int, seconds: float) -> None:
        left = f", {clock((rounds - done) * seconds)} left" if done < rounds else ""
        progress.update(
            task, completed=done, description=f"{what}: SGD, {', '.join(methods)}{left}"
        )
        if done == 1 and not progress.console.is_terminal:
            progress.console.print(f"{what}: {rounds} rounds of {seconds:.1f} s{left}")

    timing = measure.time_kinds(case, methods, rounds, budget_s=budget_s, on_round=on_round)
    progress.remove_task(task)
    return {
        "name": case.name,
        "precision": case.precision,
        "kfac": dict(case.kfac),
        **asdict(timing),
        "settings": {m: [intervals.combine(timing, m, *s) for s in settings] for m in methods},
        "intervals": [],
        "memory_bytes": {},
    }


def clock(seconds: float) -> str:
    """Return minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def measure_intervals(
    case: Case, methods: Sequence[str], setting: tuple[int, int], count: int
) -> dict[str, Any]:
    """Time every step of whole intervals, and summarize."""
    seconds = measure.run_intervals(case, methods, *setting, count)
    summary = {name: intervals.summarize(s) for name, s in seconds.items()}
    return {"setting": list(setting), "seconds": seconds, "summary": summary}


def progress_bar() -> Progress:
    """Return a progress bar on stderr, because stdout is for the table."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    hidden = not console.is_terminal
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=hidden)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all models, and write the file after each part."""
    torch.set_num_threads(options.threads)
    if options.device == "cpu":
        environment.keep_freed_memory()
    results = header(options.device, options.quick)
    results |= {"kfac": options.kfac, "clock": options.clock}
    with progress_bar() as progress:
        for name in options.models:
            for _ in measure_model(name, options, progress, results["models"]):
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    return results


def measure_model(
    name: str, options: argparse.Namespace, progress: Progress, entries: list[dict[str, Any]]
) -> Iterator[None]:
    """Add the model's entry part by part, and yield after each part."""
    say, methods = progress.console.print, options.methods
    size = Size(batch=options.batch or 0, quick=options.quick)
    case = Case(name, size, options.device, options.precision, options.kfac, options.clock)
    settings = ((1, 2), (2, 4)) if options.quick else SETTINGS
    entry = measure_case(case, methods, settings, options.rounds, progress)
    entries.append(entry)
    say(f"{name}: {tables.rate(entry) / 1e9:,.0f} GFLOP/s in a product of 2048x2048")
    yield
    if not options.no_memory:
        say(f"{name}: peak memory of {memory.STEPS} full steps, a process per variant")
        entry["memory_bytes"] = memory.peaks(case, methods)
        yield
    for i, setting in enumerate(settings if options.real and name in REAL else ()):
        steps = options.intervals * setting[1] + 1
        means = [entry["settings"][m][i]["mean_s"] for m in methods]
        left = steps * (statistics.median(entry["sgd_s"]) + sum(means))
        say(f"{name}: {steps} steps of whole intervals at {setting}, about {clock(left)}")
        entry["intervals"].append(measure_intervals(case, methods, setting, options.intervals))
        yield


def kept() -> list[dict[str, Any]]:
    """Return the kept measurements."""
    return [json.loads(path.read_text()) for path in sorted(KEPT.glob("speed_*.json"))]


def write_kept_tables(page: Path) -> None:
    """Write the tables of the kept measurements between the two marks of a page.

    Raises:
        UsageError: The page cannot be read or written, or it lacks a mark.
    """
    before, after = around_marks(page, BEGIN, END, "--into")
    text = tables.render_together(kept())
    write_text(page, f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def main(arguments: Sequence[str]) -> int:
    """Measure, and return the exit code: 2 for bad input."""
    try:
        options = parse(arguments)
        if options.into:
            write_kept_tables(options.into)
            return 0
        print(tables.render(run(options)))
        print(f"all results: {options.out}", file=sys.stderr)
    except UsageError as error:
        print(f"speed.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
