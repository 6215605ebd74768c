"""Turn the finished runs of a study into its verdict, as text and as a page."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from kfac_bench import report
from kfac_bench.benchmark.own_problem import paste, spaces
from kfac_bench.benchmark.own_problem.asked import Asked, base_words
from kfac_bench.benchmark.own_problem.spaces import REFERENCE
from kfac_bench.benchmark.own_problem.study import HOPELESS, StudyResult, final_limit_s
from kfac_bench.benchmark.own_problem.trial_result import TrialResult
from kfac_bench.benchmark.own_problem.try_result import Finalist, SeedRun, TryResult
from kfac_bench.benchmark.own_problem.verdict import verdict
from kfac_bench.config import compose
from kfac_bench.record.events import EVENTS_FILE
from kfac_bench.record.runs import number
from kfac_bench.report.tables import Table, Value
from kfac_bench.whole_files import write_text


def try_result(asked: Asked, found: StudyResult, *, is_quick: bool) -> TryResult:
    """Return what the verdict needs to know of a study."""
    problem = asked.chosen.problem
    made = {name: _finalist(asked, found, name) for name in found.finals}
    return TryResult(
        problem=asked.title,
        metric=problem.metric_title,
        higher_is_better=problem.higher_is_better,
        target=found.plan.target,
        reference=made.pop(REFERENCE),
        rivals=list(made.values()),
        seeds=asked.seeds,
        is_own_target=found.plan.is_own_target,
        reference_steps=found.plan.budget.reference_steps,
        left_out=_left_out(found),
        has_tried_kfac=any(each[0]["kfac"] != "none" for each in asked.candidates.values()),
        minutes=asked.minutes,
        is_quick=is_quick,
    )


def write(asked: Asked, found: StudyResult, folder: Path, *, is_quick: bool) -> str:
    """Write ``verdict.txt`` and the page ``verdict.html`` into the folder; return the verdict."""
    text = verdict(try_result(asked, found, is_quick=is_quick))
    write_text(folder / "verdict.txt", text + "\n")
    runs = sorted(path.parent for path in (folder / "final").rglob(EVENTS_FILE))
    title = f"Does K-FAC help on {asked.title}?"
    if runs:
        report.compare(runs, folder / "verdict.html", [_trials_table(found)], title, text)
    return text


def _finalist(asked: Asked, found: StudyResult, name: str) -> Finalist:
    winner, results = found.winners[name], found.finals[name]
    config = compose.load(base_words(asked, winner.settings))
    problem = asked.chosen.problem
    return Finalist(
        name=spaces.tuning().labels[name],
        runs=[SeedRun(r.seed, r.time_s, r.steps, r.curve) for r in results],
        limit_s=final_limit_s(winner, found.plan.budget),
        paste=paste.lines(config, problem, asked.words),
        uses_kfac=config.kfac.enabled,
        step_s=_middle([_step_s(r) for r in results]),
        memory_bytes=_middle([_memory_bytes(r) for r in results]),
        stages_s=_stages_s(results),
    )


def _middle(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return median(known) if known else math.nan


def _step_s(result: TrialResult) -> float:
    """Return the seconds of a step; the first recorded steps are left out as warm-up."""
    trained = result.trained
    if len(trained) < 2 or trained[-1].step <= trained[0].step:
        return math.nan
    steps = trained[-1].step - trained[0].step
    return (trained[-1].train_s - trained[0].train_s) / steps


def _memory_bytes(result: TrialResult) -> float:
    values = [number(e.peak_memory_bytes) for e in result.trained]
    return max((v for v in values if math.isfinite(v)), default=math.nan)


def _stages_s(results: Sequence[TrialResult]) -> dict[str, float]:
    """Return the seconds of each stage of K-FAC in all steps of all runs."""
    total: dict[str, float] = {}
    for result in results:
        before = 0
        for event in result.trained:
            steps, before = event.step - before, event.step
            for stage, mean_s in event.stage_mean_s.items():
                if math.isfinite(mean_s) and mean_s > 0:
                    total[stage] = total.get(stage, 0.0) + steps * mean_s
    return total


def _left_out(found: StudyResult) -> dict[str, str]:
    """Return the optimizers that did not run on fresh seeds, with what tuning showed."""
    labels = spaces.tuning().labels
    reasons = {}
    for name, trials in found.trials.items():
        if name in found.finals:
            continue
        if name not in found.winners:
            reasons[labels[name]] = "no trial fits into the budget"
        elif math.isfinite(found.winners[name].time_s):
            reasons[labels[name]] = f"{found.winners[name].time_s:.3g} s in tuning"
        else:
            why = next((r.reason for r in trials if r.reason), "")
            reasons[labels[name]] = "missed the target in tuning" + (f" ({why})" if why else "")
    return reasons


def _trials_table(found: StudyResult) -> Table:
    """Return a row for each trial of the tuning."""
    labels = spaces.tuning().labels
    rows: list[list[Value]] = []
    for name, trials in found.trials.items():
        for count, trial in enumerate(trials, start=1):
            shown = ", ".join(f"{k} {v}" for k, v in trial.settings.items() if "." in k)
            rows.append([labels[name], count, shown, str(trial.seed)])
            rows[-1] += [trial.time_s, trial.train_s, trial.reason]
    budget = found.plan.budget
    note = (
        f"Each optimizer had {budget.tune_s:.3g} training seconds. A trial stops when it cannot be "
        f"faster than the best one of its optimizer, after {HOPELESS} times the seconds of the "
        f"best one of all, and at the latest after {budget.limit_s:.3g} s. The best settings ran "
        "again on other seeds, if the seconds sufficed. The median decides"
    )
    columns = (
        *("optimizer", "trial", "settings", "seed"),
        *("seconds to target", "seconds trained", "remark"),
    )
    return Table("Tuning", columns, rows, [note])
