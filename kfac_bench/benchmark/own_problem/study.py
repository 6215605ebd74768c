"""The study of ``kfac-bench try``: tuning in turns, then the winners on fresh seeds.

At the end of the tuning, the best settings run again on other seeds.

Each decision follows from the plan and from the event files of the runs before. So a study that was
killed continues: the same decisions lead to the same run directories, and a finished run is not
run again.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kfac_bench.benchmark.grid import Cell, WorkSession
from kfac_bench.benchmark.local_runs import warn_if_busy
from kfac_bench.benchmark.own_problem import study_input
from kfac_bench.benchmark.own_problem.first_runs import TUNING_SEED, make_plan
from kfac_bench.benchmark.own_problem.leaderboard import Leaderboard, TrialPhase
from kfac_bench.benchmark.own_problem.study_input import REFERENCE, Asked, Settings, base_words
from kfac_bench.benchmark.own_problem.study_plan import (
    FINALISTS,
    TRIALS,
    Budget,
    StudyFolder,
    StudyPlan,
)
from kfac_bench.benchmark.own_problem.try_result import LEAST_SEEDS
from kfac_bench.benchmark.trials import TrialResult, TrialRunner, take_turns
from kfac_bench.config.command_options import path_word

CRASHES = 2
"""After this number of trials that died before their first step, an optimizer gets no more."""
WORTH = 0.25
"""Share of the best time (or of the limit) that must be left for one more trial."""
HOPELESS = 10
"""A trial is stopped after this multiple of the best seconds of all optimizers. Without this, an
optimizer that reaches the target slowly or never would have few trials."""
REPEATED = 3
"""Number of the best settings of an optimizer that run again, if its seconds suffice."""
REPEAT_SEEDS = (TUNING_SEED + 1, TUNING_SEED + 2)
"""Seeds of these runs. The best of many trials on one seed may owe its place to the seed."""
PATIENCE = 2
"""A setting that runs again may take this multiple of the seconds of the best trial."""
OVERRUN = 1.25
"""The runs on fresh seeds may take this multiple of their planned seconds."""


@dataclass(frozen=True)
class StudyResult:
    """All that came of a study."""

    plan: StudyPlan
    trials: Mapping[str, Sequence[TrialResult]]
    """All runs of the tuning, in order."""
    winners: Mapping[str, TrialResult]
    """A run of the best setting of each optimizer: the median one if it ran on more seeds."""
    finals: Mapping[str, Sequence[TrialResult]]
    """The runs of each winner on fresh seeds."""


def run(asked: Asked, folder: StudyFolder, board: Leaderboard) -> StudyResult:
    """Run what is left of the study in a folder that this process has locked.

    Args:
        asked: What the study is about.
        folder: The folder.
        board: Shows the trials.

    Raises:
        UsageError: The problem fails on its first batch, or the minutes are too few.
        KeyboardInterrupt: A run was interrupted; the same call continues.
    """
    plan = folder.plan()
    if plan is None:
        warn_if_busy(board.say)
        plan = make_plan(asked, folder, board.say)
        folder.write_plan(plan)
    board.target = plan.target
    return Phases(asked, folder, plan, board).run()


class Phases:
    """Tuning, and the runs on fresh seeds."""

    def __init__(
        self, asked: Asked, folder: StudyFolder, plan: StudyPlan, board: Leaderboard
    ) -> None:
        self._asked, self._folder, self._plan, self._board = asked, folder, plan, board
        self._labels = study_input.tuning().labels
        self._budget = plan.budget
        self._runner = TrialRunner(WorkSession(), is_strict=False)

    def run(self) -> StudyResult:
        """Run what is left of both phases."""
        trials = self._tune()
        self._repeat(trials)
        winners = best_trials(trials)
        finals = self._confirm(winners)
        return StudyResult(self._plan, trials, winners, finals)

    def _tune(self) -> dict[str, list[TrialResult]]:
        """Let the optimizers try settings in turns, until the seconds of each are spent."""
        results: dict[str, list[TrialResult]] = {name: [] for name in self._asked.candidates}

        def run_next(name: str) -> bool:
            own, limit_s = results[name], self._next_limit_s(name, results)
            if limit_s is None:
                return False
            settings = self._asked.candidates[name][len(own)]
            own.append(self._trial("tuning", name, settings, TUNING_SEED, limit_s))
            left_s = sum(self._tuning_left_s(each, results) for each in results)
            runs = sum(self._trials_left(each, results) for each in results)
            left = self._time_left(left_s + self._confirm_s(results), runs + self._finals(results))
            self._board.end(name, "tuning", own[-1], left)
            return True

        take_turns(results, run_next)
        return results

    def _repeat(self, results: Mapping[str, list[TrialResult]]) -> None:
        """Add runs of the best settings on other seeds, in turns, while the seconds suffice."""
        every = {name: _to_repeat(own) for name, own in results.items()}
        best = {name: trials for name, trials in every.items() if trials}
        for seed in REPEAT_SEEDS:
            for name, trials in best.items():
                # All of them or none: their medians are compared.
                limit_s = PATIENCE * trials[0].time_s
                if len(trials) * (limit_s + self._budget.start_s) > self._left_s(results[name]):
                    continue
                for trial in trials:
                    own = self._trial("tuning", name, trial.settings, seed, limit_s)
                    results[name].append(own)
                    left = self._time_left(self._confirm_s(results), self._finals(results))
                    self._board.end(name, "tuning", own, left)

    def _trials_left(self, name: str, results: Mapping[str, Sequence[TrialResult]]) -> int:
        """Return the largest number of further trials of an optimizer."""
        if self._next_limit_s(name, results) is None:
            return 0
        return len(self._asked.candidates[name]) - len(results[name])

    def _tuning_left_s(self, name: str, results: Mapping[str, Sequence[TrialResult]]) -> float:
        """Return the training seconds that an optimizer will need at most."""
        limit_s = self._next_limit_s(name, results)
        if limit_s is None:
            return 0.0
        return min(self._left_s(results[name]), limit_s * self._trials_left(name, results))

    def _finals(self, trials: Mapping[str, Sequence[TrialResult]]) -> int:
        """Return the number of runs on fresh seeds, if the best trials so far win."""
        names = finalists(best_trials(trials), self._budget, self._asked.seeds)
        return self._asked.seeds * max(FINALISTS, len(names))

    def _confirm_s(self, trials: Mapping[str, Sequence[TrialResult]]) -> float:
        """Return the training seconds of the fresh seeds, if the best trials so far win."""
        if not all(trials.values()):
            return self._budget.confirm_s
        winners = best_trials(trials)
        names = finalists(winners, self._budget, self._asked.seeds)
        limit_s = self._budget.limit_s
        return self._asked.seeds * sum(min(winners[name].time_s, limit_s) for name in names)

    def _left_s(self, results: Sequence[TrialResult]) -> float:
        """Return the seconds that an optimizer has left.

        The minutes have room for the starts of a few trials. More trials pay for their starts.
        """
        starts_s = max(0, len(results) - TRIALS) * self._budget.start_s
        return max(0.0, self._budget.tune_s - sum(r.train_s for r in results) - starts_s)

    def _next_limit_s(
        self, name: str, results: Mapping[str, Sequence[TrialResult]]
    ) -> float | None:
        """Return the longest time of the next trial; None if there is no further trial.

        A trial that takes longer than the optimizer's best one cannot win.
        """
        own = results[name]
        if len(own) == len(self._asked.candidates[name]):
            return None
        if sum(r.has_crashed for r in own) >= CRASHES:
            return None
        hopeless_s = [HOPELESS * r.time_s for trials in results.values() for r in trials]
        best_s = min([self._budget.limit_s, *(r.time_s for r in own), *hopeless_s])
        left_s = self._left_s(own)
        least_s = max(WORTH * best_s, self._budget.eval_freq * self._budget.step_s)
        return None if left_s < least_s else min(best_s, left_s)

    def _confirm(self, winners: Mapping[str, TrialResult]) -> dict[str, list[TrialResult]]:
        """Run the finalists on fresh seeds in turns, as long as the seconds suffice."""
        names = finalists(winners, self._budget, self._asked.seeds)
        results: dict[str, list[TrialResult]] = {name: [] for name in names}
        for seed in range(self._asked.seeds):
            spent_s = sum(r.train_s for own in results.values() for r in own)
            # The runs may take longer than in tuning. Fewer seeds than planned are reported, but
            # a verdict needs the least number of seeds.
            if (
                seed >= LEAST_SEEDS
                and spent_s * (seed + 1) / seed > OVERRUN * self._budget.confirm_s
            ):
                break
            for number, name in enumerate(names, start=1):
                winner = winners[name]
                limit_s = final_limit_s(winner, self._budget)
                result = self._trial("final", name, winner.settings, seed, limit_s)
                results[name].append(result)
                done = seed + number / len(names)
                spent_s = sum(r.train_s for own in results.values() for r in own)
                seeds = self._asked.seeds - done
                left = self._time_left(spent_s * seeds / done, len(names) * seeds)
                self._board.end(name, "final", result, left)
        return results

    def _trial(
        self, phase: TrialPhase, name: str, settings: Settings, seed: int, limit_s: float
    ) -> TrialResult:
        """Run a trial unless it has ended; a failure is a result like any other."""
        self._board.begin(name, phase, seed)
        runs_dir = str(self._folder.runs_dir(phase))
        cell = self.cell(name, settings, seed, limit_s, runs_dir)
        result = self._runner.run(cell, settings)
        # The event file is the result. Checkpoints of so many runs could fill a disk.
        shutil.rmtree(cell.path() / "checkpoints", ignore_errors=True)
        return result

    def cell(self, name: str, settings: Settings, seed: int, limit_s: float, runs_dir: str) -> Cell:
        """Return a run of the study as a cell of a grid."""
        made = self._budget
        overrides = (
            *base_words(self._asked, settings),
            f"label='{self._labels[name]}'",
            f"trainer.target={self._plan.target!r}",
            f"trainer.max_steps={made.max_steps}",
            f"trainer.eval_freq={made.eval_freq}",
            f"trainer.max_train_s={limit_s:.6g}",
            f"seed={seed}",
            path_word("runs_dir", runs_dir),
        )
        return Cell(self._labels[name], overrides, self._asked.ranks, {}, seed)

    def _time_left(self, train_s: float, runs: float) -> str:
        made, ran = self._budget, self._runner
        start_s = made.start_s
        if ran.runs:
            start_s = max(0.0, ran.wall_s - ran.train_s * made.wall_per_s) / ran.runs
        wall_s = train_s * made.wall_per_s + runs * start_s
        return f"about {wall_s / 60:.0f} min left" if wall_s > 90 else f"about {wall_s:.0f} s left"


def _to_repeat(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the best trials, best first; none if there is nothing to choose or to compare.

    Only the first one has certainly reached the target: a trial that takes longer is stopped.
    """
    best = sorted(trials, key=lambda t: t.key)[:REPEATED]
    return best if len(best) > 1 and math.isfinite(best[0].time_s) else []


def best_trials(trials: Mapping[str, Sequence[TrialResult]]) -> dict[str, TrialResult]:
    """Return for each optimizer that has a trial the median run of its best setting.

    Only settings with the most seeds count. With two seeds, the slower run is the median.
    """
    winners = {}
    for name, own in trials.items():
        seeds: dict[str, list[TrialResult]] = {}
        for trial in own:
            seeds.setdefault(repr(sorted(trial.settings.items())), []).append(trial)
        most = max(map(len, seeds.values()), default=0)
        medians = [
            sorted(runs, key=lambda t: t.key)[most // 2]
            for runs in seeds.values()
            if len(runs) == most
        ]
        if medians:
            winners[name] = min(medians, key=lambda t: t.key)
    return winners


def final_limit_s(winner: TrialResult, made: Budget) -> float:
    """Return the longest time of a winner on a fresh seed, which may be slower."""
    if math.isinf(winner.time_s):
        return made.limit_s
    return max(winner.time_s, min(3 * winner.time_s, 2 * made.limit_s))


def finalists(winners: Mapping[str, TrialResult], made: Budget, seeds: int) -> list[str]:
    """Return the optimizers that run on fresh seeds: AdamW, and the best others that fit.

    At least one other runs. If some winners have reached the target, only they run beside AdamW.
    """
    others = sorted((n for n in winners if n != REFERENCE), key=lambda n: winners[n].key)
    is_reached = any(math.isfinite(winners[n].time_s) for n in others)
    chosen = [REFERENCE] if REFERENCE in winners else []
    planned_s = sum(min(winners[n].time_s, made.limit_s) for n in chosen)
    for number, name in enumerate(others):
        own_s = min(winners[name].time_s, made.limit_s)
        starts_s = max(0, len(chosen) + 1 - FINALISTS) * made.start_s
        fits = seeds * (planned_s + own_s + starts_s) <= made.confirm_s
        if number and (not fits or (is_reached and math.isinf(winners[name].time_s))):
            break
        chosen.append(name)
        planned_s += own_s
    return chosen
