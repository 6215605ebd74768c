"""A benchmark's cells: its axes times its seeds, each run in processes of its own.

A cell is a run of ``kfac-train`` (of several ranks: torchrun's) whose overrides are those of the
benchmark's file with the axes' values filled in. What a cell came to is in its run directory, never
in memory: events.jsonl, or cell.json with the reason where the process failed. A finished cell is
not run again, a failed one only where that is asked for; it counts as a missed target.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kfac_bench.benchmark import forked
from kfac_bench.benchmark.schema import Before, Benchmark, BenchmarkProfile, points, profile_of
from kfac_bench.config import TrainConfig, compose
from kfac_bench.counted import time_left
from kfac_bench.errors import UsageError
from kfac_bench.record.events import EVENTS_FILE, RunEnded, read
from kfac_bench.training import run_directory

FAILED_FILE = "cell.json"
"""Of a cell whose process failed: why."""
INTERRUPTED = (130, 143)
"""Exit codes of a run that somebody stopped: it goes on next time."""


@dataclass(frozen=True)
class Cell:
    """One run: where it stands in the table, and the overrides that make it."""

    label: str
    overrides: tuple[str, ...]
    ranks: int = 1
    point: Mapping[str, str] = field(default_factory=dict, hash=False)
    seed: int = 0
    before: tuple[Cell, ...] = ()

    def config(self) -> TrainConfig:
        """The configuration, checked."""
        return compose.load(self.overrides)

    def path(self) -> Path:
        """Its run directory: a function of its configuration and its ranks."""
        return _path(self.overrides, self.ranks)

    def arguments(self) -> list[str]:
        """What each of its ranks is started with, after ``python``."""
        return ["-m", "kfac_bench", *self.overrides, f"run_id={self.path().name}"]

    def command(self) -> list[str]:
        """What runs it on several ranks of this machine."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        return [sys.executable, *torchrun, str(self.ranks), *self.arguments()]


@functools.cache
def _path(overrides: tuple[str, ...], ranks: int) -> Path:
    config = compose.load(overrides)
    # Not of this job: jobs of a cluster and the terminal must find the same directory.
    suffix = "" if ranks == 1 or config.run_id is not None else f"-{ranks}ranks"
    return Path(config.runs_dir) / run_directory.directory_name(config, job="", suffix=suffix)


def cells(
    benchmark: Benchmark,
    runs_dir: str,
    seeds: Sequence[int] | None = None,
    profile: str | None = None,
    more: Sequence[str] = (),
) -> list[Cell]:
    """The grid of the axes times the seeds; ``more`` are overrides of every cell.

    Seeds are the outer loop: what slows the machine for a while slows every setting.
    """
    name, sized = profile_of(benchmark, profile)
    if not benchmark.overrides:
        return []
    folder = Path(runs_dir)
    shared = str(folder.parent / "shared")
    own = benchmark.seeds if sized.seeds is None else sized.seeds
    before = benchmark.before if sized.before is None else sized.before
    result = []
    for seed in own if seeds is None else seeds:
        for point in points(benchmark, sized):
            words = {**point, "profile": name, "seed": str(seed), "shared": shared}
            label = " ".join([*point.values(), f"seed {seed}"])
            first = tuple(_before(each, words, label, more) for each in before)
            texts = [*benchmark.overrides, *sized.overrides]
            texts += [t for axis in point for t in _stands_for(benchmark, sized, axis, point[axis])]
            overrides, ranks = _filled_in(texts, words)
            overrides = (*overrides, *more, f"seed={seed}", f"runs_dir={runs_dir}")
            result.append(Cell(label, overrides, ranks, point, seed, before=first))
    return result


def _filled_in(texts: Sequence[str], words: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    """The overrides, and the ranks that the last ``ranks=N`` among them says."""
    made = [text.format(**words) for text in texts]
    ranks = [int(text.removeprefix("ranks=")) for text in made if text.startswith("ranks=")]
    return tuple(text for text in made if not text.startswith("ranks=")), (ranks or [1])[-1]


def _stands_for(
    benchmark: Benchmark, profile: BenchmarkProfile, axis: str, value: str
) -> list[str]:
    """The overrides that a value of an axis stands for, in this profile."""
    each = benchmark.each.get(axis, {}) | profile.each.get(axis, {})
    return each.get(value, [])


def _before(each: Before, words: Mapping[str, str], label: str, more: Sequence[str]) -> Cell:
    overrides, ranks = _filled_in(each.overrides, words)
    own = (f"seed={words['seed']}", f"runs_dir={words['shared']}")
    name = each.run_id.format(**words)
    return Cell(f"{label}: {name}", (*overrides, *more, *own, f"run_id={name}"), ranks)


def run_cells(todo: Sequence[Cell], say: Callable[[str], None], *, retry: bool = False) -> int:
    """Run every cell that has not ended, one after the other; how many failed."""
    failed, left = 0, sum(outcome(cell) is None for cell in todo)
    took_s: list[float] = []
    for number, cell in enumerate(todo, start=1):
        began, fresh = time.monotonic(), outcome(cell) is None
        good, said = run_cell(cell, retry=retry)
        failed += not good
        if fresh:
            left -= 1
            took_s.append(time.monotonic() - began)
        said += time_left(took_s, left)
        say(f"[{number}/{len(todo)}] {cell.label}: {said}")
    return failed


def run_cell(cell: Cell, *, retry: bool = False) -> tuple[bool, str]:
    """Run the cell unless it has ended; whether it has now, and how, in words.

    A cell that failed before has ended, but for ``retry``.
    """
    before, why = outcome(cell), failure(cell.path())
    if before and not (retry and (why or before.startswith("failed"))):
        return not why, f"{before} (before)"
    for first in cell.before:
        good, said = run_cell(first, retry=retry)
        if not good:
            reason = f"{first.path().name}, which it starts from, {said}"
            record_failure(cell.path(), cell.label, reason)
            return False, f"failed: {reason}"
    if cell.ranks > (most := os.cpu_count() or 1):
        reason = f"{cell.ranks} ranks are more than the {most} cores here: launcher=slurm"
        record_failure(cell.path(), cell.label, reason)
        return False, f"failed: {reason}"
    error, code = _run(cell)
    if code in INTERRUPTED:
        return False, f"interrupted: {error}"
    came_to = None if code < 0 else ended(cell.path())
    if came_to is None:
        record_failure(cell.path(), cell.label, error, code)
        return False, f"failed: {error}"
    return True, came_to


def _run(cell: Cell) -> tuple[str, int]:
    """Run one cell in processes of its own; the line that says what went wrong, and the code."""
    if cell.ranks == 1:
        code, said = forked.train([*cell.overrides, f"run_id={cell.path().name}"])
        return f"kfac-train: {said} (exit code {code})", code
    done = subprocess.run(  # noqa: S603
        cell.command(), capture_output=True, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    lines = done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or ["no output"]
    own = [line for line in lines if line.startswith("kfac-train: ")]  # torchrun says more after it
    return f"{(own or lines)[-1]} (exit code {done.returncode})", done.returncode


def record_failure(folder: Path, label: str, reason: str, code: int = 1) -> None:
    """Leave in the cell's directory why it failed: a miss of the table, with its reason."""
    path = folder / FAILED_FILE
    record = {"label": label, "reason": reason, "exit_code": code}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot write here ({error.strerror})") from None


def failure(folder: Path) -> str | None:
    """Why the cell of this directory failed; None if it did not, or has ended well since."""
    try:
        record = json.loads((folder / FAILED_FILE).read_text(encoding="utf-8"))
        reason = str(record["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return reason if ended(folder) is None else None


def outcome(cell: Cell) -> str | None:
    """How the cell ended, None if it has not."""
    why = failure(cell.path())
    return ended(cell.path()) if why is None else f"failed: {why}"


def ended(path: Path) -> str | None:
    """How the run of this directory ended by its events, None if it has not."""
    if not (path / EVENTS_FILE).exists():
        return None
    ended = next((e for e in reversed(read(path)) if isinstance(e, RunEnded)), None)
    if ended is None or ended.status == "interrupted":
        return None
    return f"{ended.status} at step {ended.step}, {ended.train_s:.2f} s {ended.message}".strip()
