"""``study NAME``: each study tunes each optimizer, and runs the winner on a new seed.

A study has its own seed and its own scrambled Halton sequence. For each task and optimizer:

1. It runs ``tuning.trials`` trials. A trial stops when it has taken ``patience`` times as long as
   the best one so far in this session.
2. The three fastest trials run on two more seeds. The winner has the smallest median of its three
   times.
3. The winner runs on the study's seed of the table. No setting was chosen with this seed.

So the table has one run of each study, and the spread of these runs covers the tuning. Times are
interpolated (:mod:`.interpolated`). The optimizers take turns within each part. What has run is not
run again, so the work can be divided into sittings.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.contest.interpolated import reached
from benchmarks.contest.sitting import tasks_of
from kfac_bench.benchmark import schema
from kfac_bench.benchmark.grid import TimeIsUp, WorkSession
from kfac_bench.benchmark.schema import Benchmark, Tuning
from kfac_bench.benchmark.trials import TrialResult, shown_s, take_turns, trial_settings
from kfac_bench.benchmark.tune import TuningRuns
from kfac_bench.errors import UsageError

FINALISTS, MORE_SEEDS = 3, 2
PART = "studies"
"""The part of the store that has all runs of a contest with studies."""

Rank = tuple[float, float]
"""Interpolated seconds to the target, then the best metric with a sign. Smaller is better."""


def run_studies(
    benchmark: Benchmark,
    runs_dir: str,
    session: WorkSession,
    say: Callable[[str], None],
    tasks: Sequence[str] = (),
) -> bool:
    """Run what is missing; return whether everything has run.

    Args:
        benchmark: A benchmark with a tuning section, and one seed of the table for each study.
        runs_dir: Where run directories go.
        session: The time limit and the store.
        say: Prints a line.
        tasks: Only these tasks; (): all.

    Raises:
        UsageError: The benchmark has no such sections, or a task is unknown.
    """
    tuning = benchmark.tuning
    if tuning is None or len(benchmark.seeds) < len(tuning.seeds):
        raise UsageError(f"{benchmark.title!r} has no tuning with a seed of the table per study")
    known = tasks_of(benchmark)
    for task in tasks:
        if task not in known:
            raise UsageError(f"--tasks {task}: no such task; there are {', '.join(known)}")
    runs = TuningRuns(benchmark, tuning, runs_dir, session)
    for point in schema.points(benchmark):
        if not tasks or point["task"] in tasks:
            runs.check(point, trial_settings(tuning, point["optimizer"])[0])
    try:
        for study in range(len(tuning.seeds)):
            for task in tasks or known:
                _Study(benchmark, tuning, task, study, runs, session, say).run()
    except TimeIsUp:
        say("time is up; the same command continues")
        return False
    return True


class _Study:
    """One study of all optimizers on one task."""

    def __init__(
        self,
        benchmark: Benchmark,
        tuning: Tuning,
        task: str,
        study: int,
        runs: TuningRuns,
        session: WorkSession,
        say: Callable[[str], None],
    ) -> None:
        self._tuning, self._task, self._study, self._runs, self._session, self._say = (
            tuning, task, study, runs, session, say,
        )  # fmt: skip
        self._seed, self._fresh = tuning.seeds[study], benchmark.seeds[study]
        points = [{"task": task, "optimizer": name} for name in benchmark.axes["optimizer"]]
        self._optimizers = [
            p["optimizer"]
            for p in points
            if schema.may_run(benchmark, p)
            and study < tuning.studies.get(p["optimizer"], len(tuning.seeds))
        ]

    def run(self) -> None:
        """Run the three parts."""
        trials: dict[str, list[TrialResult]] = {name: [] for name in self._optimizers}
        take_turns(self._optimizers, lambda name: self._next_trial(name, trials[name]))
        finalists = {name: sorted(of, key=self._rank)[:FINALISTS] for name, of in trials.items()}
        finals: dict[str, list[list[TrialResult]]] = defaultdict(list)
        take_turns(
            self._optimizers, lambda name: self._next_finalist(name, finalists[name], finals[name])
        )
        for name in self._optimizers:
            ranks = list(map(self._median_rank, finalists[name], finals[name]))
            winner = finalists[name][ranks.index(min(ranks))]
            last = self._train(name, winner, self._fresh, "table")
            self._tell(name, f"winner {shown_s(min(ranks)[0])}; {last}", is_new=last.is_new)

    def _next_trial(self, name: str, trials: list[TrialResult]) -> bool:
        tuning = self._tuning
        if len(trials) == tuning.trials:
            return False
        settings = trial_settings(tuning, name, self._study)[len(trials)]
        limit_s = tuning.patience * min((t.here_s for t in trials), default=math.inf)
        point = {"task": self._task, "optimizer": name}
        turn = f"{self._study} trials"
        trials.append(self._runs.run(point, settings, self._seed, turn, limit_s))
        self._tell(name, str(trials[-1]), is_new=trials[-1].is_new)
        return True

    def _next_finalist(
        self, name: str, trials: list[TrialResult], finals: list[list[TrialResult]]
    ) -> bool:
        if len(finals) == len(trials):
            return False
        trial = trials[len(finals)]
        seeds = [1000 * self._seed + i for i in range(MORE_SEEDS)]
        # A setting that missed the target is not run on other seeds.
        is_met = math.isfinite(trial.time_s)
        finals.append([self._train(name, trial, seed, "final") for seed in seeds if is_met])
        return True

    def _median_rank(self, trial: TrialResult, finals: Sequence[TrialResult]) -> Rank:
        each = [self._rank(trial)] + [self._rank(final, "final") for final in finals]
        return median(r[0] for r in each), median(r[1] for r in each)

    def _rank(self, trial: TrialResult, kind: str = "trial") -> Rank:
        run = trial.run()
        if run is None or trial.path is None or math.isinf(trial.time_s):
            return trial.key
        # Each turn measures the machine again, so `time_s` has the scale of an earlier moment.
        scale = self._session.factor(self._task, kind, trial.path)
        return reached(run).seconds * scale, trial.key[1]

    def _train(self, name: str, trial: TrialResult, seed: int, kind: str) -> TrialResult:
        point = {"task": self._task, "optimizer": name}
        turn = f"{self._study} {kind}"
        return self._runs.run(point, trial.settings, seed, turn, kind=kind)

    def _tell(self, name: str, what: str, *, is_new: bool) -> None:
        if is_new:
            self._say(f"study {self._study + 1}, {self._task}, {name}: {what}")
