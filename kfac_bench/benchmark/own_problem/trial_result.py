"""The result of one run of a study, read from its event file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfac_bench.benchmark import run_end
from kfac_bench.errors import UsageError
from kfac_bench.record import score
from kfac_bench.record.events import RunEnded, Trained
from kfac_bench.record.runs import Run, load, number, plain


@dataclass(frozen=True)
class TrialResult:
    """A run: its settings, what it reached, and what it cost."""

    settings: Mapping[str, Any]
    seed: int
    run: Run | None
    """None: the run died before its first event."""
    failure: str
    """Why the process failed; empty if it did not."""

    @classmethod
    def of(cls, path: Path, settings: Mapping[str, Any], seed: int) -> "TrialResult":
        """Read the run of a directory."""
        failed = run_end.failure(path)
        failure = "" if failed is None else failed.reason
        try:
            run = load(path)
        except UsageError as error:
            return cls(settings, seed, None, failure or str(error))
        return cls(settings, seed, run, failure)

    @property
    def time_s(self) -> float:
        """Training seconds to the target; inf if it was missed."""
        return math.inf if self.run is None else score.time_to_target_s(self.run)

    @property
    def steps(self) -> float:
        """Steps to the target; inf if it was missed."""
        return math.inf if self.run is None else score.steps_to_target(self.run)

    @property
    def train_s(self) -> float:
        """Training seconds of the run, until its last event."""
        events = () if self.run is None else self.run.events
        seconds = [number(e.train_s) for e in events]
        return max((s for s in seconds if math.isfinite(s)), default=0.0)

    @property
    def key(self) -> tuple[float, float]:
        """What decides which trial is best; smaller is better."""
        return (math.inf, math.inf) if self.run is None else rank(self.run)

    @property
    def has_crashed(self) -> bool:
        """Whether the run failed before its first step, so that other settings may fail, too."""
        return bool(self.failure) and self.train_s == 0

    @property
    def reason(self) -> str:
        """Why the target was missed, in a few words; empty if it was reached."""
        if math.isfinite(self.time_s):
            return ""
        if self.failure:
            return plain(self.failure)
        ended = [e for e in self.run.events if isinstance(e, RunEnded)] if self.run else []
        return plain(ended[-1].message) if ended and ended[-1].message else ""

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Training seconds and metric of each evaluation."""
        return [(s, m) for _, s, m in score.metric_curve(self.run)] if self.run else []

    @property
    def trained(self) -> list[Trained]:
        """The events of training steps."""
        return [e for e in self.run.events if isinstance(e, Trained)] if self.run else []

    def __str__(self) -> str:
        shown = " ".join(f"{k}={v}" for k, v in self.settings.items() if "." in k)
        if math.isfinite(self.time_s):
            return f"{shown}: {self.time_s:.3g} s to the target"
        why = f" ({self.reason})" if self.reason else ""
        return f"{shown}: not reached in {self.train_s:.3g} s{why}"


def rank(run: Run) -> tuple[float, float]:
    """Return what decides which run is best: the seconds to target, then the best metric.

    Smaller is better. The second number is infinite if the run has no finite metric.
    """
    best = score.best_metric(run)
    signed = -best if run.started.higher_is_better else best
    return score.time_to_target_s(run), signed if math.isfinite(best) else math.inf
