"""One trial of a tuning: its settings, its run and its result.

``kfac-bench tune``, ``kfac-bench try`` and the contest decide which trials run, and in which order.
They draw the same Halton points (:func:`trial_settings`), run them in the same way
(:class:`TrialRunner`), let optimizers take turns (:func:`take_turns`) and compare results by the
same rank. A trial whose run has ended is not run again.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from scipy.stats import qmc

from kfac_bench.benchmark import grid, run_end
from kfac_bench.benchmark.grid import Cell, WorkSession
from kfac_bench.benchmark.schema import Tuning
from kfac_bench.errors import UsageError
from kfac_bench.record import score
from kfac_bench.record.runs import Run, load, number, plain

T = TypeVar("T")


def shown_s(time_s: float) -> str:
    """Return the seconds to target as text; ``missed`` if they are infinite."""
    return "missed" if math.isinf(time_s) else f"{time_s:.2f} s"


def trial_settings(tuning: Tuning, optimizer: str, study: int = 0) -> list[dict[str, Any]]:
    """Return the overrides of every trial. They depend on the space, `trials` and `study`."""
    space = tuning.space[optimizer]
    # An option with a fixed value is no dimension of the sequence.
    ranges = {k: v for k, v in space.items() if isinstance(v, dict)}
    samples = qmc.Halton(max(1, len(ranges)), seed=study).random(tuning.trials)
    return [
        {k: _value(ranges[k], u[list(ranges).index(k)]) if k in ranges else v
         for k, v in space.items()}
        for u in samples
    ]  # fmt: skip


def _value(option: Mapping[str, list[Any]], u: float) -> Any:
    """Return the value of a range at ``u`` in [0, 1)."""
    match dict(option):
        case {"log": [low, high]}:
            # Three digits keep experiment files readable.
            return float(f"{low * (high / low) ** u:.3g}")
        case {"uniform": [low, high]}:
            return float(f"{low + (high - low) * u:.4g}")
        case {"integer": [low, high]}:
            return low + math.floor(u * (high - low + 1))
        case {"choice": [*choices]}:
            return choices[math.floor(u * len(choices))]
    raise UsageError(
        f"tuning space: {dict(option)} is no range. Write log, uniform or integer: [low, high], or "
        "choice: [value, ...]"
    )


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Return a point of the space as overrides of ``kfac-train``."""
    return [f"{k}={'null' if v is None else v}" for k, v in settings.items()]


@dataclass(frozen=True)
class TrialResult:
    """A run: its settings, what it reached, and what it cost."""

    settings: Mapping[str, Any]
    seed: int
    key: tuple[float, float] = (math.inf, math.inf)
    """The rank of the trial among trials, from :func:`rank`; smaller is better. The seconds are
    those of the first session's machine."""
    here_s: float = math.inf
    """Training seconds to target on this machine; inf if missed or trained in another session."""
    steps: float = math.inf
    """Steps to the target; inf if it was missed."""
    train_s: float = 0.0
    """Training seconds of the run, until its last event."""
    failure: str = ""
    """The reason why the process failed; empty if it did not."""
    message: str = ""
    """The message of the event with which the run ended."""
    path: Path | None = None
    """The run directory; None: the run died before its first event."""
    is_new: bool = True
    """True if this command ran the trial, and no earlier one."""

    @classmethod
    def of(cls, path: Path, settings: Mapping[str, Any], seed: int, **others: Any) -> "TrialResult":
        """Read the run of a directory.

        Args:
            path: The directory.
            settings: The settings of the trial.
            seed: The seed of the run.
            others: Further fields.
        """
        failed = run_end.failure(path)
        failure = "" if failed is None else failed.reason
        try:
            run = load(path)
        except UsageError as error:
            return cls(settings, seed, failure=failure or str(error), **others)
        seconds = [number(e.train_s) for e in run.events]
        return cls(
            settings,
            seed,
            key=rank(run),
            steps=score.steps_to_target(run),
            train_s=max((s for s in seconds if math.isfinite(s)), default=0.0),
            failure=failure,
            message=(run.ended.message or "") if run.ended else "",
            path=path,
            **others,
        )

    @property
    def time_s(self) -> float:
        """Training seconds to the target; inf if it was missed."""
        return self.key[0]

    @property
    def has_crashed(self) -> bool:
        """True if the run failed before its first step, so that other settings may fail, too."""
        return bool(self.failure) and self.train_s == 0

    @property
    def reason(self) -> str:
        """The reason why the target was missed, in a few words; empty if it was reached."""
        return "" if math.isfinite(self.time_s) else plain(self.failure or self.message)

    def run(self) -> Run | None:
        """Read the whole run from its directory; None if it died before its first event."""
        return load(self.path) if self.path else None

    @property
    def outcome(self) -> str:
        """The seconds to the target, or the reason why the target was missed."""
        if math.isfinite(self.time_s):
            return f"{self.time_s:.3g} s to the target"
        why = f" ({self.reason})" if self.reason else ""
        return f"not reached in {self.train_s:.3g} s{why}"

    def __str__(self) -> str:
        shown = " ".join(f"{k}={v}" for k, v in self.settings.items() if "." in k)
        return f"{shown}: {self.outcome}"


def rank(run: Run) -> tuple[float, float]:
    """Return the sort key of runs: the seconds to target, then the best metric with a sign.

    Smaller is better. The second number is infinite if the run has no finite metric.
    """
    best = score.best_metric(run)
    signed = -best if run.started.higher_is_better else best
    return score.time_to_target_s(run), signed if math.isfinite(best) else math.inf


class TrialRunner:
    """Runs trials within a session, unless they have run.

    Args:
        session: The time limit, the baselines and the store.
        is_strict: Whether options that are wrong end the command. Otherwise they are a failure of
            this trial, like any other.

    Attributes:
        wall_s: Seconds of wall time of the trials that this process has run.
        train_s: Their training seconds.
        runs: Their number.
    """

    def __init__(self, session: WorkSession, *, is_strict: bool) -> None:
        self.session, self._is_strict = session, is_strict
        self.wall_s = self.train_s = 0.0
        self.runs = 0

    def run(
        self, cell: Cell, settings: Mapping[str, Any], kind: str = "trial", turn: str = ""
    ) -> TrialResult:
        """Run a trial and return its result; a failure is a result like any other.

        Args:
            cell: The run.
            settings: Its settings.
            kind: What the store calls it.
            turn: A new turn begins when every optimizer has run one more trial.

        Raises:
            KeyboardInterrupt: The run was interrupted.
            TimeIsUp: The trial has not run, and the time limit of the session has passed.
            UsageError: The options are wrong, or an earlier process still writes to the directory.
        """
        path, task, began = cell.path(), cell.point.get("task", ""), time.monotonic()
        is_new = run_end.outcome(path) is None
        if is_new:
            run_end.wait_until_free(path)
            self.session.begin(task, turn)
            self._train(cell)
        self.session.keep(kind, path, cell.point, cell.seed, settings)
        result = TrialResult.of(path, settings, cell.seed, is_new=is_new)
        if is_new:
            self.wall_s += time.monotonic() - began
            self.train_s += result.train_s
            self.runs += 1
        time_s, metric = result.key
        here_s = time_s if self.session.is_own(task, kind, path) else math.inf
        key = time_s * self.session.factor(task, kind, path), metric
        return replace(result, key=key, here_s=here_s)

    def _train(self, cell: Cell) -> None:
        code, line = grid.train(cell)
        if code == 2 and self._is_strict:  # Every other trial would fail, too.
            raise UsageError(f"{' '.join(cell.overrides)}: {grid.bare(line)}")
        # An interrupted trial is no miss: the next start of the command continues it.
        if code in run_end.INTERRUPTED:
            raise KeyboardInterrupt
        grid.record_end(cell, code, line)


def take_turns(names: Iterable[T], run_next: Callable[[T], bool]) -> None:
    """Let each optimizer run its next trial in turn, so that a slow hour slows all alike.

    Args:
        names: The optimizers.
        run_next: Runs a trial of an optimizer; returns False if the optimizer has no further one.
    """
    every, has_run = list(names), True
    while has_run:
        # A list, because any() alone would leave out optimizers after the first that has run.
        turn = [run_next(name) for name in every]
        has_run = any(turn)
