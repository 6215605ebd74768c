"""Lists the runs of a folder, with their state, size and age. `kfac-bench runs` calls this file.

Links are never followed, so nothing outside the folder is read or counted.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kfac_bench.errors import UsageError
from kfac_bench.record import checkpoint_folder, run_lock, runs
from kfac_bench.record.events import EVENTS_FILE, RunEnded

RUNNING, KILLED, UNREADABLE = "running", "killed", "unreadable"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class ListedRun:
    """A run as `kfac-bench runs list` shows it."""

    path: Path
    state: str
    """The status of the last event, or RUNNING, KILLED or UNREADABLE."""
    step: int
    checkpoints: int
    size_bytes: int
    age_s: float
    """Time since the last event."""


def directories(root: Path) -> Iterator[Path]:
    """Yield the run directories in `root` and in all folders below, in the order of names.

    Raises:
        UsageError: `root` is no folder.
    """
    if not root.is_dir():
        raise UsageError(f"--runs-dir {root}: no such folder; give the folder of the runs")
    for folder, names, files in os.walk(root):
        names.sort()
        if EVENTS_FILE in files:
            names.clear()
            yield Path(folder)


def listed(root: Path) -> list[ListedRun]:
    """Return the runs in `root`, the newest first."""
    every = (_listed(path) for path in directories(root))
    return sorted((run for run in every if run is not None), key=lambda run: run.age_s)


def _listed(path: Path) -> ListedRun | None:
    """Return what is shown of a run; None if nothing trained, or the run was removed meanwhile."""
    state, step = UNREADABLE, 0
    try:
        is_running = run_lock.is_held(path)
        run = runs.load(path)
        if runs.was_computed(run):
            return None
        last = run.events[-1]
        step = last.step
        state = runs.plain(last.status) if isinstance(last, RunEnded) else KILLED
        state = RUNNING if is_running else state
    except UsageError:
        pass
    folder = path / CHECKPOINTS
    try:
        count = 0 if folder.is_symlink() else len(checkpoint_folder.steps(folder))
        return ListedRun(path, state, step, count, size_of(path), age_of(path))
    except FileNotFoundError:
        return None


def size_of(folder: Path) -> int:
    """Return the bytes of all files in the folder; a file that vanishes meanwhile counts as 0."""
    total = 0
    for where, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue
    return total


def age_of(path: Path) -> float:
    """Return the seconds since the last event of a run."""
    return max(0.0, time.time() - os.lstat(path / EVENTS_FILE).st_mtime)
