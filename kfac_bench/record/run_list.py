"""The runs of a folder: their state, size and age, and the removal of old checkpoints.

``kfac-bench runs`` calls this file. Links are never followed, so nothing outside the folder is
read, counted or removed. Of each run the newest good checkpoints stay, and the best ones that the
run itself keeps (`trainer.keep_best`). A run that is running is left alone.
"""

import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from kfac_bench.errors import UsageError
from kfac_bench.output import counted, size_text
from kfac_bench.record import checkpoint_folder, own_files, runs
from kfac_bench.record.events import EVENTS_FILE, RunEnded
from kfac_bench.record.own_files import refuse_special

RUNNING, KILLED, UNREADABLE = "running", "killed", "unreadable"
CHECKPOINTS = "checkpoints"
DAY_S = 86400.0


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
    """Time since the last event; 0 if it is unknown."""


def directories(root: Path) -> Iterator[Path]:
    """Yield the run directories in `root`, at the end the folders that cannot be read.

    Raises:
        UsageError: `root` is no folder.
    """
    if not root.is_dir():
        raise UsageError(f"--runs-dir {root}: no such folder; give the folder of the runs")
    unreadable: list[Path] = []
    yield from runs.directories(root, lambda error: unreadable.append(Path(error.filename)))
    yield from unreadable


def listed(root: Path) -> list[ListedRun]:
    """Return the runs in `root`, the newest first."""
    every = (_listed(path) for path in directories(root))
    return sorted((run for run in every if run is not None), key=lambda run: run.age_s)


def _listed(path: Path) -> ListedRun | None:
    """Return the line of a run; None if nothing trained, or the run was removed meanwhile."""
    state, step = UNREADABLE, 0
    try:
        is_running = own_files.is_locked(path)
        run = runs.load(path)
        if runs.was_computed(run):
            return None
        last = run.events[-1]
        step = last.step
        state = runs.plain(last.status) if isinstance(last, RunEnded) else KILLED
        state = RUNNING if is_running else state
    except (UsageError, PermissionError):
        pass
    try:
        return ListedRun(path, state, step, _checkpoints(path), size_of(path), age_of(path))
    except OSError as error:
        is_gone = isinstance(error, FileNotFoundError) and not path.exists()
        return None if is_gone else ListedRun(path, state, step, 0, 0, 0.0)


def _checkpoints(path: Path) -> int:
    """Return the number of checkpoints; 0 for a folder that this user may not read."""
    folder = path / CHECKPOINTS
    with suppress(PermissionError):
        return 0 if folder.is_symlink() else len(checkpoint_folder.steps(folder))
    return 0


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


@dataclass
class Pruned:
    """Counts of the things that `prune` removed, or would remove, over all runs."""

    runs: int = 0
    checkpoints: int = 0
    freed_bytes: int = 0
    left_alone: int = 0
    """Number of runs that are running or whose checkpoints cannot be judged or removed."""


def prune(
    root: Path, keep: int, older_than_days: float, say: Callable[[str], None], *, dry_run: bool
) -> Pruned:
    """Remove old checkpoints of the runs in `root`, and unfinished ones of killed processes.

    Args:
        root: The folder of runs.
        keep: The number of newest good checkpoints that stay in each run.
        older_than_days: Only runs are pruned whose last event is at least so old.
        say: Prints a line about a run.
        dry_run: Whether to count only, and remove nothing.

    Raises:
        UsageError: `root` is no folder, or a number is too small.
    """
    if keep < 1:
        raise UsageError(f"--keep {keep}: must be at least 1, because a run continues from there")
    if not older_than_days >= 0:
        raise UsageError(f"--older-than {older_than_days:g}: must be at least 0 days")
    pruned = Pruned()
    for path in directories(root):
        try:
            if age_of(path) >= older_than_days * DAY_S:
                _prune_run(path, keep, pruned, say, dry_run)
        except (UsageError, OSError) as error:
            if not path.exists():  # somebody else has removed the run meanwhile
                continue
            pruned.left_alone += 1
            why = f"{path}: {error.strerror or error}" if isinstance(error, OSError) else error
            say(f"left alone: {why}")
    return pruned


def _prune_run(
    path: Path, keep: int, pruned: Pruned, say: Callable[[str], None], dry_run: bool
) -> None:
    folder = path / CHECKPOINTS
    if not folder.exists() and not folder.is_symlink():
        return
    if own_files.is_locked(path):
        raise UsageError(f"{path}: the run is running")
    with ExitStack() as stack:
        if not dry_run:
            # If the run starts now, it waits for this lock.
            stack.enter_context(own_files.locked(path, 0.0, say))
        names = _removable(path, keep)
        if not names:
            return
        size = sum(size_of(folder / name) for name in names)
        if not dry_run:
            _remove(folder, names)
    pruned.runs += 1
    pruned.checkpoints += len(names)
    pruned.freed_bytes += size
    verb = "would remove" if dry_run else "removed"
    say(f"{path}: {verb} {counted(len(names), 'checkpoint')}, {size_text(size)}")


def _removable(path: Path, keep: int) -> list[str]:
    """Return the names of the checkpoints that the run does not need.

    Raises:
        UsageError: The folder of checkpoints is a link, or no checkpoint is good.
    """
    folder = path / CHECKPOINTS
    refuse_special(folder, folder=True)
    unfinished = [
        name
        for name in sorted(os.listdir(folder))
        if re.fullmatch(r"\.step-\d+\.\w+\.partial", name) and _is_folder(folder / name)
    ]
    steps = [
        step
        for step in checkpoint_folder.steps(folder)
        if _is_folder(checkpoint_folder.path_of(folder, step))
    ]
    if len(steps) <= keep:
        return unfinished
    # Only a checkpoint whose hashes fit can continue a run. A damaged one may be the newest.
    good: list[int] = []
    for step in reversed(steps):
        if checkpoint_folder.is_good(checkpoint_folder.path_of(folder, step)):
            good.append(step)
        if len(good) == keep:
            break
    if not good:
        raise UsageError(f"{path}: no checkpoint is good, so nothing is removed")
    best = checkpoint_folder.best_first(folder)[: _keep_best(path)]
    old = (
        [step for step in steps if step < good[-1] and step not in best]
        if len(good) == keep
        else []
    )
    return [checkpoint_folder.path_of(folder, step).name for step in old] + unfinished


def _keep_best(path: Path) -> int:
    """Return the number of best checkpoints to keep, from the option of the run's last start."""
    found = runs.last_option(runs.load(path).events, "trainer", "keep_best")
    return found if isinstance(found, int) and found >= 0 else 1


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(os.lstat(path).st_mode)


def _remove(folder: Path, names: list[str]) -> None:
    """Remove entries of the folder. Whatever replaces the folder by a link meanwhile is safe."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for name in names:
            shutil.rmtree(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
