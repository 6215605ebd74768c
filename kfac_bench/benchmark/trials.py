"""One trial of a tuning: its settings, its run and its result.

``kfac-bench tune``, ``kfac-bench try`` and the contest decide which trials run. They draw the same
Halton points (:func:`trial_settings`). A trial whose run has ended is not run again.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import qmc

from kfac_bench.benchmark import grid, local_runs, run_end, schema
from kfac_bench.benchmark.grid import WorkSession
from kfac_bench.benchmark.schema import Benchmark, BenchmarkProfile, Tuning
from kfac_bench.config import compose
from kfac_bench.config.command_options import path_word
from kfac_bench.errors import UsageError
from kfac_bench.record import score
from kfac_bench.record.events import EVENTS_FILE, RunEnded, RunStarted, Trained, read
from kfac_bench.record.runs import Run, load, number, plain
from kfac_bench.training.run_directory import run_id


@dataclass(frozen=True)
class TuningTrial:
    """One point of the space with one seed, and its result; a smaller ``key`` is better."""

    settings: Mapping[str, Any]
    key: tuple[float, float]
    """Training seconds to target (inf if missed), then the gap between the best metric and the
    target. The seconds are those of the first session's machine."""
    here_s: float = math.inf
    """Training seconds to target on this machine; inf if missed or trained in another session."""
    is_new: bool = True
    """True if this command ran the trial, and no earlier one."""

    @property
    def time_s(self) -> float:
        """Training seconds to target, inf if missed."""
        return self.key[0]

    def __str__(self) -> str:
        result = shown_s(self.time_s) + ("" if math.isinf(self.time_s) else " to target")
        return f"{shown_settings(self.settings)}: {result}"


def shown_settings(settings: Mapping[str, Any]) -> str:
    """Return the values of a trial as text, without the choices of groups."""
    return " ".join(f"{k}={v}" for k, v in settings.items() if "." in k)


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
        f"tuning space: {dict(option)} is neither log, uniform or integer: [low, high] nor choice: "
        "[...]"
    )


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Return a point of the space as overrides of ``kfac-train``."""
    return [f"{k}={'null' if v is None else v}" for k, v in settings.items()]


@dataclass(frozen=True)
class PlannedTrial:
    """A trial that is to be run, and in which turn of the optimizers."""

    kind: str
    point: Mapping[str, str]
    settings: Mapping[str, Any]
    seed: int
    limit_s: float
    turn: str

    @property
    def task(self) -> str:
        """The task, or "" for a benchmark without this axis."""
        return self.point.get("task", "")


class TrialRunner:
    """Runs trials of one benchmark in one folder of runs, within a session.

    Args:
        benchmark: The benchmark, whose tuning section is ``tuning``.
        tuning: Overrides of every trial.
        runs_dir: The folder of runs.
        session: The time limit, the baselines and the store.
    """

    def __init__(
        self, benchmark: Benchmark, tuning: Tuning, runs_dir: str, session: WorkSession
    ) -> None:
        self._benchmark, self._tuning, self._runs_dir = benchmark, tuning, runs_dir
        self.session = session

    def check(self, point: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        """Raise :class:`UsageError` if the options of a trial are wrong, before any trial runs."""
        compose.load(self._overrides(PlannedTrial("trial", point, settings, 0, math.inf, "")))

    def trial(
        self,
        point: Mapping[str, str],
        settings: Mapping[str, Any],
        seed: int,
        limit_s: float,
        turn: str,
    ) -> TuningTrial:
        """Run a trial of a study, which stops after ``limit_s``.

        A new ``turn`` begins when every optimizer has run one more trial.

        Raises:
            KeyboardInterrupt: The run was interrupted.
            TimeIsUp: The trial has not run, and the time limit of the session has passed.
            UsageError: The options are wrong.
        """
        # The limit is no part of the name: in one study later trials have smaller limits only, so
        # a trial that was stopped would be stopped again. A run without limit has another name.
        run = PlannedTrial("trial", point, settings, seed, limit_s, turn)
        return self._run(run, "-trial")

    def final(
        self, point: Mapping[str, str], settings: Mapping[str, Any], seed: int
    ) -> TuningTrial:
        """Run a winner on the seed of another study, without a limit; errors as in `trial`."""
        run = PlannedTrial("final", point, settings, seed, math.inf, f"final {seed}")
        return self._run(run, "")

    def _run(self, run: PlannedTrial, suffix: str) -> TuningTrial:
        overrides = self._overrides(run)
        config = compose.load(overrides)
        # Without the job's number, because jobs of a cluster share the directory.
        name = run_id(config, job="") + suffix
        path = Path(config.runs_dir) / name
        is_new = run_end.outcome(path) is None
        if is_new:
            self.session.begin(run.task, run.turn)
            if run.limit_s < (config.trainer.max_train_s or math.inf):
                overrides.append(f"trainer.max_train_s={run.limit_s}")
            code, line = local_runs.train_forked([*overrides, f"run_id={name}"])
            if code == 2:  # The options are wrong, so every other trial would fail too.
                raise UsageError(f"{' '.join(overrides)}: {line}")
            # An interrupted trial is no miss: the next start of the command continues it.
            if code in run_end.INTERRUPTED:
                raise KeyboardInterrupt
            if run_end.ended(path) is None:
                run_end.record_failure(path, name, f"kfac-train: {line} (exit code {code})", code)
        self.session.keep(run.kind, path, run.point, run.seed, run.settings)
        time_s, gap = _judge(path, config.trainer.target)
        comparable_s = time_s * self.session.factor(run.task, run.kind, path)
        here_s = time_s if self.session.is_own(run.task, run.kind, path) else math.inf
        return TuningTrial(run.settings, (comparable_s, gap), here_s, is_new)

    def _overrides(self, run: PlannedTrial) -> list[str]:
        texts = [*self._tuning.overrides]
        for axis, value in run.point.items():
            texts += grid.options_of_value(self._benchmark, BenchmarkProfile(), axis, value)
        base = [schema.fill_in(text, run.point) for text in texts]
        own = [f"seed={run.seed}", path_word("runs_dir", self._runs_dir)]
        return [*base, *overrides_of(run.settings), *own]


def _judge(path: Path, target: float | None) -> tuple[float, float]:
    """Return the training seconds to target, and the gap between the best metric and the target."""
    if target is None or not (path / EVENTS_FILE).exists():
        return math.inf, math.inf
    if not any(isinstance(e, RunStarted) for e in read(path)):
        return math.inf, math.inf
    run = load(path)
    gap = abs(score.best_metric(run) - target)
    return score.time_to_target_s(run), math.inf if math.isnan(gap) else gap


@dataclass(frozen=True)
class TrialResult:
    """A run: its settings, what it reached, and what it cost."""

    settings: Mapping[str, Any]
    seed: int
    run: Run | None
    """None: the run died before its first event."""
    failure: str
    """The reason why the process failed; empty if it did not."""

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
        """The rank of the trial among trials, from :func:`rank`; smaller is better."""
        return (math.inf, math.inf) if self.run is None else rank(self.run)

    @property
    def has_crashed(self) -> bool:
        """True if the run failed before its first step, so that other settings may fail, too."""
        return bool(self.failure) and self.train_s == 0

    @property
    def reason(self) -> str:
        """The reason why the target was missed, in a few words; empty if it was reached."""
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
        shown = shown_settings(self.settings)
        if math.isfinite(self.time_s):
            return f"{shown}: {self.time_s:.3g} s to the target"
        why = f" ({self.reason})" if self.reason else ""
        return f"{shown}: not reached in {self.train_s:.3g} s{why}"


def rank(run: Run) -> tuple[float, float]:
    """Return the sort key of runs: the seconds to target, then the best metric with a sign.

    Smaller is better. The second number is infinite if the run has no finite metric.
    """
    best = score.best_metric(run)
    signed = -best if run.started.higher_is_better else best
    return score.time_to_target_s(run), signed if math.isfinite(best) else math.inf
