"""The first runs of a study: they try one batch, measure seconds, and fix a missing target."""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from pathlib import Path
from statistics import median

from kfac_bench.benchmark import grid, run_end
from kfac_bench.benchmark.grid import Cell
from kfac_bench.benchmark.own_problem.study_input import REFERENCE, Asked, Settings, base_words
from kfac_bench.benchmark.own_problem.study_plan import (
    Budget,
    MeasuredSeconds,
    StudyFolder,
    StudyPlan,
    budget_of,
)
from kfac_bench.config.command_options import path_word
from kfac_bench.errors import UsageError
from kfac_bench.record import score
from kfac_bench.record.runs import load

TUNING_SEED = 1000
"""The seed of the first runs and of all trials. Fresh seeds count from 0."""
FIRST_STEPS, STEPS = 4, 16
"""Steps of the runs that measure seconds of a step, of an evaluation and of a start."""
MANY_EVALUATIONS_S = 10.0
"""Seconds of a run with two evaluations above which few evaluations are measured."""
COUNTED, REFERENCE_EVALUATIONS = 5, 10
"""Evaluations of the AdamW run that fixes a missing target: the last ones, whose median counts, and
all of them."""
DEFAULT: Settings = {"optimizer": REFERENCE, "kfac": "none"}
"""AdamW with its defaults: the setting that is measured, and that fixes a missing target."""


def make_plan(asked: Asked, folder: StudyFolder, say: Callable[[str], None]) -> StudyPlan:
    """Run AdamW a few times; return the budget and the target.

    Raises:
        UsageError: The problem fails on its first batch, or the minutes are too few.
        KeyboardInterrupt: A run was interrupted.
    """
    folder.remove_first_runs()
    say("trying one batch, and measuring the seconds of a step and of an evaluation")
    budget = _FirstRuns(asked, folder).budget()
    if asked.target is not None:
        return StudyPlan(budget, asked.target, is_own_target=False)
    say(f"the problem has no target: AdamW trains for {budget.reference_steps} steps to fix one")
    return StudyPlan(
        budget, _FirstRuns(asked, folder).reached(budget.reference_steps), is_own_target=True
    )


class _FirstRuns:
    def __init__(self, asked: Asked, folder: StudyFolder) -> None:
        self._asked, self._folder = asked, folder

    def budget(self) -> Budget:
        """Measure, and divide the minutes."""
        began = time.monotonic()
        # The first run tries a batch. It also starts the server of processes, which takes seconds.
        first_s, first = self._timed("first", FIRST_STEPS, FIRST_STEPS)
        self._check_target(first)
        # Minutes that would be too few without evaluations and starts are refused at once.
        self._divide(MeasuredSeconds(_step_s(first), 0.0, 0.0, time.monotonic() - began))
        few_s, few = self._timed("few", STEPS, STEPS)
        # Seconds of starts vary, so the difference of two runs needs many evaluations.
        eval_freq = 1 if first_s < MANY_EVALUATIONS_S else STEPS // 4
        many_s, many = self._timed("many", STEPS, eval_freq)
        trained_s = {path: load(path).events[-1].train_s for path in (few, many)}
        evaluations = STEPS // eval_freq - 1
        eval_s = max(0.0, many_s - trained_s[many] - few_s + trained_s[few]) / evaluations
        start_s = max(0.0, few_s - trained_s[few] - 2 * eval_s)
        spent_s = time.monotonic() - began
        return self._divide(MeasuredSeconds(_step_s(many), eval_s, start_s, spent_s))

    def _check_target(self, first: Path) -> None:
        """Refuse a target that the initial weights meet."""
        run, target = load(first), self._asked.target
        begins = score.metric_curve(run)[0][2]
        if target is None or math.isnan(begins):
            return
        if begins >= target if run.started.higher_is_better else begins <= target:
            raise UsageError(
                f"{self._asked.file}: the untrained model meets the target {target:g} already: its "
                f"{run.started.metric} is {begins:.4g}. Set a harder target, or check "
                "higher_is_better"
            )

    def _divide(self, measured: MeasuredSeconds) -> Budget:
        asked = self._asked
        optimizers, has_target = len(asked.candidates), asked.target is not None
        return budget_of(asked.minutes, measured, optimizers, asked.seeds, has_target=has_target)

    def _timed(self, name: str, steps: int, eval_freq: int) -> tuple[float, Path]:
        """Run AdamW for some steps; return the wall seconds and the run directory."""
        words = (
            f"trainer.max_steps={steps}",
            f"trainer.eval_freq={eval_freq}",
            "trainer.log_freq=1",
        )
        began = time.monotonic()
        path = self._run("speed", name, words)
        return time.monotonic() - began, path

    def reached(self, steps: int) -> float:
        """Return the median metric of the last evaluations of AdamW's default setting.

        The run has a number of steps, so that the target does not depend on seconds. The best
        metric of all would depend on a single lucky evaluation.
        """
        words = (
            f"trainer.max_steps={steps}",
            f"trainer.eval_freq={steps // REFERENCE_EVALUATIONS}",
        )
        run = load(self._run("reference", REFERENCE, words))
        values = [value for _, _, value in score.metric_curve(run)]
        begins, reached, is_better = values[0], median(values[-COUNTED:]), max
        if not run.started.higher_is_better:
            is_better = min
        if not math.isfinite(reached) or is_better(reached, begins) == begins:
            raise UsageError(
                f"{self._asked.file}: AdamW's default setting does not improve the metric in "
                f"{steps} steps, so no target can be fixed. Set target= in Problem(...)"
            )
        return rounded(reached, begins, higher_is_better=run.started.higher_is_better)

    def _run(self, phase: str, name: str, words: Sequence[str]) -> Path:
        """Run AdamW with its defaults; a failure ends the study."""
        folder = self._folder.runs_dir(phase)
        own = [f"seed={TUNING_SEED}", path_word("runs_dir", folder)]
        overrides = (*base_words(self._asked, DEFAULT), *words, "trainer.target=null", *own)
        cell = Cell(name, overrides, self._asked.ranks, folder=folder / name)
        code, line = grid.train(cell)
        if code in run_end.INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            prefix = "" if code == 2 else f"{self._asked.file}: AdamW with its defaults fails: "
            raise UsageError(prefix + grid.bare(line))
        shutil.rmtree(folder / name / "checkpoints", ignore_errors=True)
        return folder / name


def rounded(best: float, begins: float, *, higher_is_better: bool) -> float:
    """Return four digits of a metric, as a target that the metric itself has reached.

    If the metric of the untrained model, ``begins``, would meet this target, all digits stay.
    """
    rounding = ROUND_FLOOR if higher_is_better else ROUND_CEILING
    target = float(Context(prec=4, rounding=rounding).create_decimal(repr(best)))
    is_met = begins >= target if higher_is_better else begins <= target
    return best if is_met else target


def _step_s(path: Path) -> float:
    """Return the seconds of a step, without the first recorded one."""
    return max(1e-6, load(path).pace[0])
