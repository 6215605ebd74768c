"""A benchmark's cells: its axes times its seeds, each run in its own processes.

A cell is a run of ``kfac-train``. Its overrides are those of the benchmark's file, with the values
of the axes filled in. The result of a cell is in its run directory, never in memory
(:mod:`.run_end`). A finished cell is not run again. A failed cell counts as a missed target and is
run again only on request.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kfac_bench.benchmark import local_runs, run_end
from kfac_bench.benchmark.schema import (
    Before,
    Benchmark,
    BenchmarkProfile,
    fill_in,
    points,
    profile_of,
    seeds_of,
)
from kfac_bench.config import TrainConfig, compose
from kfac_bench.config.command_options import path_word, whole_number
from kfac_bench.distributed import slurm_rank
from kfac_bench.errors import UsageError
from kfac_bench.output import time_left
from kfac_bench.training import run_directory


class TimeIsUp(Exception):  # noqa: N818 - no error: the same command continues
    """The time limit has passed, so that nothing more is started."""


class WorkSession:
    """One command that runs cells or trials, perhaps with a time limit.

    Commands tell the session what they are about to train, and what has ended. The contest in
    benchmarks/contest has a session that also keeps results and measures its machine.

    Args:
        minutes: The time limit; None: no limit.
        now: The clock in seconds.

    Raises:
        UsageError: The limit is negative.
    """

    def __init__(
        self, minutes: float | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        if minutes is not None and not minutes >= 0:
            raise UsageError(f"--minutes {minutes:g}: must be at least 0")
        self._now = now
        self._ends_s = None if minutes is None else now() + 60 * minutes

    def begin(self, task: str, turn: str) -> None:
        """Prepare for training on the task; raise :class:`TimeIsUp` after the time limit.

        A new ``turn`` begins when every optimizer has run one more time.
        """
        self._check_time()

    def _check_time(self) -> None:
        if self._ends_s is not None and self._now() >= self._ends_s:
            raise TimeIsUp

    def keep(
        self,
        kind: str,
        folder: Path,
        point: Mapping[str, str],
        seed: int,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the run of a folder, if this session keeps results."""

    def factor(self, task: str, kind: str, folder: Path) -> float:
        """Return the number by which the seconds of a run are multiplied to be comparable."""
        return 1.0

    def is_own(self, task: str, kind: str, folder: Path) -> bool:
        """Return whether the run was trained on this session's machine."""
        return True


@dataclass(frozen=True)
class Cell:
    """One run: its place in the table, and its overrides of kfac-train."""

    label: str
    overrides: tuple[str, ...]
    ranks: int = 1
    point: Mapping[str, str] = field(default_factory=dict, hash=False)
    seed: int = 0
    before: tuple[Cell, ...] = ()
    """Runs that this run starts from."""
    folder: Path | None = None
    """The run directory, if it does not follow from the overrides."""

    def config(self) -> TrainConfig:
        """Return the checked configuration."""
        return compose.load(self.overrides)

    def path(self) -> Path:
        """Return the run directory, which depends only on the configuration and the ranks."""
        return self.folder or _path(self.overrides, self.ranks)

    def rank_command(self) -> list[str]:
        """Return the command of one rank."""
        return local_runs.local_command(self._named(), 1)

    def command(self) -> list[str]:
        """Return the command that runs all ranks on this machine."""
        return local_runs.local_command(self._named(), self.ranks)

    def _named(self) -> list[str]:
        return [*self.overrides, f"run_id={self.path().name}"]


@functools.cache
def _path(overrides: tuple[str, ...], ranks: int) -> Path:
    config = compose.load(overrides)
    # Without the job's number: jobs of a cluster and the terminal must find the same directory.
    suffix = "" if ranks == 1 or config.run_id is not None else f"-{ranks}ranks"
    return Path(config.runs_dir) / (run_directory.run_id(config, job="") + suffix)


def cells(
    benchmark: Benchmark,
    runs_dir: str,
    seeds: Sequence[int] | None = None,
    profile: str | None = None,
    more: Sequence[str] = (),
) -> list[Cell]:
    """Return the cells: every point of the axes with every seed.

    Seeds are the outer loop. So a slow hour of the machine slows all settings alike.

    Args:
        benchmark: The table or figure.
        runs_dir: Where run directories go.
        seeds: Replace the seeds of the benchmark.
        profile: The size of the row; None: the first profile.
        more: Further overrides of every cell.
    """
    name, sized = profile_of(benchmark, profile)
    if not benchmark.overrides:
        return []
    shared = str(Path(runs_dir).parent / "shared")
    before = benchmark.before if sized.before is None else sized.before
    result = []
    for seed in seeds_of(benchmark, sized) if seeds is None else seeds:
        for point in points(benchmark, sized):
            words = {**point, "profile": name, "seed": str(seed), "shared": shared}
            label = " ".join([*point.values(), f"seed {seed}"])
            first = tuple(_before(each, words, label, more) for each in before)
            texts = [*benchmark.overrides, *sized.overrides]
            for axis in [*point, *joined_axes(benchmark, sized)]:
                value = " ".join(point[each] for each in axis.split(" "))
                texts += options_of_value(benchmark, sized, axis, value)
            overrides, ranks = _filled_in(texts, words)
            overrides = (*overrides, *more, f"seed={seed}", path_word("runs_dir", runs_dir))
            recipes = (w for w in overrides if w.lstrip("+").startswith("recipe="))
            if recipe := next((w for w in recipes if not w.endswith("=none")), None):
                raise UsageError(
                    f"{recipe}: a recipe changes with the number of ranks. Write its options "
                    "instead, or name an experiment"
                )
            result.append(Cell(label, overrides, ranks, point, seed, before=first))
    return result


def joined_axes(benchmark: Benchmark, profile: BenchmarkProfile) -> list[str]:
    """Return the keys of ``each`` that join several axes by spaces."""
    return [axes for axes in benchmark.each | profile.each if " " in axes]


def options_of_value(
    benchmark: Benchmark, profile: BenchmarkProfile, axis: str, value: str
) -> list[str]:
    """Return the overrides that a value of an axis, or of joined axes, stands for."""
    each = benchmark.each.get(axis, {}) | profile.each.get(axis, {})
    return each.get(value, [])


def _filled_in(texts: Sequence[str], words: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    """Return the overrides, and the ranks: ``ranks=N`` is no override, and the last one counts."""
    made = [fill_in(text, words) for text in texts]
    for i, text in enumerate(texts):
        if "{shared}" in text:
            option, _, path = made[i].partition("=")
            made[i] = path_word(option, path)
    ranks = [word for word in made if word.startswith("ranks=")]
    count = whole_number("ranks", ranks[-1].removeprefix("ranks=")) if ranks else 1
    return tuple(word for word in made if word not in ranks), count


def _before(each: Before, words: Mapping[str, str], label: str, more: Sequence[str]) -> Cell:
    overrides, ranks = _filled_in(each.overrides, words)
    own = (f"seed={words['seed']}", path_word("runs_dir", words["shared"]))
    name = fill_in(each.run_id, words)
    return Cell(f"{label}: {name}", (*overrides, *more, *own, f"run_id={name}"), ranks)


def run_cells(
    todo: Sequence[Cell],
    say: Callable[[str], None],
    *,
    retry: bool = False,
    session: WorkSession | None = None,
) -> int:
    """Run every cell that has not ended, one after the other; return how many failed.

    Raises:
        TimeIsUp: The time limit of the session has passed.
        UsageError: Another process still trains a cell. Or two cells in a row were refused for the
            same reason: for example, the data are not on this machine. Both failures are forgotten,
            so that the cells run again without `retry`.
    """
    refused: Cell | None = None
    failed, left = 0, sum(run_end.will_run(cell.path(), retry=retry) for cell in todo)
    took_s: list[float] = []
    for number, cell in enumerate(todo, start=1):
        began, is_new = time.monotonic(), run_end.will_run(cell.path(), retry=retry)
        if session is not None and is_new:
            session.begin(cell.point.get("task", ""), f"seed {cell.seed}")
        is_good, text = run_cell(cell, retry=retry)
        why = run_end.refusal(cell.path())
        if session is not None and why is None:
            session.keep("table", cell.path(), cell.point, cell.seed)
        failed += not is_good
        if is_new:
            if refused is not None and why == run_end.refusal(refused.path()):
                for each in (refused, cell):
                    run_end.forget_failure(each.path())
                raise UsageError(bare(why or ""))
            refused = None if why is None else cell
            left -= 1
            took_s.append(time.monotonic() - began)
        say(f"[{number}/{len(todo)}] {cell.label}: {text}{time_left(took_s, left)}")
    return failed


def run_cell(cell: Cell, *, retry: bool = False) -> tuple[bool, str]:
    """Run the cell unless it has ended; return whether its run has ended, and how.

    A cell that failed has ended too, unless `retry` is set.
    """
    if not run_end.will_run(cell.path(), retry=retry):
        is_good = run_end.failure(cell.path()) is None
        return is_good, f"{run_end.outcome(cell.path())} (before)"
    if cell.ranks > (most := os.cpu_count() or 1):
        # Nothing is recorded: a cell that never ran is no miss, and another machine may run it.
        return False, (
            f"not run: {cell.ranks} ranks are more than the {most} cores here; use --launcher slurm"
        )
    for first in cell.before:
        is_good, text = run_cell(first, retry=retry)
        # A run can also fail by its own events, for example if its loss is not finite.
        if not is_good or text.startswith("failed"):
            # The next start continues the first run, so this cell has not failed.
            if text.startswith(("not run", "interrupted")):
                return False, text
            return record_blocked(cell, _starts_from(first, text))
    run_end.wait_until_free(cell.path())
    code, line = train(cell)
    if code in run_end.INTERRUPTED:
        return False, f"interrupted: {line}"
    return record_end(cell, code, line)


def obstacle(cell: Cell) -> tuple[str, bool]:
    """Return why the cell cannot start yet, and whether a run that it starts from has failed.

    The reason is empty if all runs that the cell starts from have ended well.
    """
    for first in cell.before:
        text = run_end.outcome(first.path())
        if text is None:
            return _starts_from(first, "has not ended"), False
        if text.startswith("failed"):
            return _starts_from(first, text), True
    return "", False


def _starts_from(first: Cell, text: str) -> str:
    return f"{first.path().name}, which it starts from, {text}"


def record_blocked(cell: Cell, reason: str) -> tuple[bool, str]:
    """Record that the cell could not start, because a run that it starts from has failed."""
    return _failed(cell, reason, has_run=False)


def train(cell: Cell) -> tuple[int, str]:
    """Train on this machine; return the exit code and the line that names the error."""
    if cell.ranks > 1:
        code, line = local_runs.run_command(cell.command())
    else:
        code, line = local_runs.train_forked([*cell.overrides, f"run_id={cell.path().name}"])
        line = f"kfac-train: {line} (exit code {code})"
    if code not in run_end.INTERRUPTED:
        slurm_rank.forget_state_of_job()
    return code, line


def bare(line: str) -> str:
    """Return the line of :func:`train` without the name of the command and the exit code."""
    return re.sub(r" \(exit code -?\d+\)$", "", line.removeprefix("kfac-train: "))


def record_end(cell: Cell, code: int, line: str) -> tuple[bool, str]:
    """Record a failure of :func:`train`; return whether the run has ended well, and how."""
    text_of_end = run_end.ended(cell.path())
    # A process that a signal killed may have ended its run before. But with `retry` the record of a
    # failure is the one of the run before.
    if text_of_end is None or (code < 0 and text_of_end.startswith("failed")):
        return _failed(cell, line, code)
    return True, text_of_end


def _failed(cell: Cell, reason: str, code: int = 1, *, has_run: bool = True) -> tuple[bool, str]:
    run_end.record_failure(cell.path(), cell.label, reason, code, has_run=has_run)
    return False, f"failed: {reason}"
