"""Performance profiles of optimizers over tasks, and AlgoPerf's score.

The definitions are those of Dahl et al. 2023, "Benchmarking Neural Network Training Algorithms"
(profiles: Dolan & Moré 2002):

* On each task the ratio of an optimizer is r = t / best t.
* Its profile rho(tau) is the share of tasks with r <= tau.
* Its score is the area below the profile for tau in [1, 4], divided by the width. The best
  optimizer on each task has score 1. An optimizer has score 0 if it misses each target or takes at
  least four times the best time.

A time is infinite if the target was missed or the task was not run. All functions are pure.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from kfac_bench.record.runs import Setting, option, target
from kfac_bench.record.score import bootstrap_median, steps_to_target, time_to_target_s
from kfac_bench.report.tables import Table, Value

TAU_MAX = 4.0
"""The end of the score's area, as in AlgoPerf."""

KRONECKER = ("kl_shampoo", "kl_soap", "shampoo", "soap")
"""Optimizers with Kronecker factors, which are not first-order optimizers."""

Times = Mapping[str, Mapping[str, float]]
"""Task to optimizer to seconds (or steps) to target."""
Ratios = dict[str, dict[str, float]]
"""Optimizer to task to r."""
Profile = list[tuple[float, float]]
"""Corners of a step function: (tau, the share of tasks from tau on), with tau rising from 1."""


def medians(settings: Iterable[Setting], *, steps: bool = False) -> dict[str, dict[str, float]]:
    """Return the median seconds (or steps) to target of each setting that has a target."""
    measure = steps_to_target if steps else time_to_target_s
    times: dict[str, dict[str, float]] = {}
    for setting in settings:
        if target(setting.runs[0]) is not None:
            # A damaged clock may give a negative time, for which a ratio has no meaning.
            values = [max(0.0, measure(run)) for run in setting.runs]
            times.setdefault(setting.task, {})[setting.optimizer] = median(values)
    return times


def ratios(times: Times) -> Ratios:
    """Return r of each optimizer on each task; infinite for all on a task that none solved."""
    names = dict.fromkeys(name for row in times.values() for name in row)
    best = {task: min(row.values(), default=math.inf) for task, row in times.items()}
    return {
        name: {task: _ratio(row.get(name, math.inf), best[task]) for task, row in times.items()}
        for name in names
    }


def _ratio(time: float, best: float) -> float:
    if math.isinf(time):
        return math.inf
    if time == best:  # This includes 0 / 0.
        return 1.0
    return time / best if best > 0 else math.inf


def profiles(times: Times) -> dict[str, Profile]:
    """Return rho of each optimizer, sorted by score with the best first, then by name."""
    made = {name: _profile(list(r.values())) for name, r in ratios(times).items()}
    order = scores(times)
    return {name: made[name] for name in sorted(made, key=lambda n: (-order[n], n))}


def _profile(values: Sequence[float]) -> Profile:
    corners = sorted({1.0, *(v for v in values if math.isfinite(v))})
    return [(tau, sum(v <= tau for v in values) / len(values)) for tau in corners]


def scores(times: Times) -> dict[str, float]:
    """Return the scores. The area below rho is the mean over tasks of max(0, 4 - r)."""
    return {
        name: fmean(max(0.0, TAU_MAX - r) / (TAU_MAX - 1) for r in of_tasks.values())
        for name, of_tasks in ratios(times).items()
    }


def not_run(times: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return a note on each task that some optimizers did not run."""
    names = {name for row in times.values() for name in row}
    return [
        f"{task}: not run, counted as missed: {', '.join(sorted(names - row.keys()))}"
        for task, row in times.items()
        if names - row.keys()
    ]


def table(times: Times, title: str = "Performance profiles", unit: str = "time") -> Table:
    """Return a row per optimizer, the best first: its score, its solved tasks, r on each task.

    ``unit`` names what the times count: ``time`` or ``steps``.
    """
    ratio, score = ratios(times), scores(times)
    tasks = list(times)
    rows: list[list[Value]] = []
    for name in profiles(times):
        solved = sum(map(math.isfinite, ratio[name].values()))
        rows.append([name, score[name], solved, *(ratio[name][task] for task in tasks)])
    columns = ["optimizer", "score", "solved", *(f"r, {task}" for task in tasks)]
    note = (
        f"r: {unit} to target over that of the best optimizer; medians over seeds, inf if half "
        f"missed. Score: area below the profile for tau in [1, {TAU_MAX:g}], at most 1"
    )
    return Table(title, columns, rows, [note])


def _is_first_order(config: Mapping[str, Any]) -> bool:
    name = option(config, "optimizer", "name")
    return not option(config, "kfac", "enabled") and name not in KRONECKER


def times_table(settings: Sequence[Setting], title: str = "Time to target") -> Table:
    """Return a row per setting with a target: its median steps and seconds, and their interval.

    The last column is the seconds over those of the task's best first-order optimizer, without
    K-FAC and not in :data:`KRONECKER`. The KL clip alone (``kfac.method=identity``) is a control,
    so it counts as K-FAC here. The column has no number where no such optimizer met the target.
    """
    seconds, steps = medians(settings), medians(settings, steps=True)
    first_order: dict[str, float] = {}
    for s in settings:
        if s.task in seconds and _is_first_order(s.runs[0].started.config):
            own = seconds[s.task][s.optimizer]
            first_order[s.task] = min(own, first_order.get(s.task, math.inf))
    rows: list[list[Value]] = []
    for s in settings:
        if s.task in seconds:
            times = [time_to_target_s(run) for run in s.runs]
            _, low, high = bootstrap_median(times)
            best = first_order.get(s.task, math.inf)
            over = None if math.isinf(best) else _ratio(seconds[s.task][s.optimizer], best)
            reached = f"{sum(map(math.isfinite, times))} of {len(times)}"
            both = steps[s.task][s.optimizer], seconds[s.task][s.optimizer]
            rows.append([s.task, s.optimizer, reached, *both, low, high, over])
    columns = (
        "task",
        "optimizer",
        "reached",
        "steps",
        "seconds",
        "low",
        "high",
        "over first-order",
    )
    note = (
        "Medians over seeds; a missed target counts as inf. Low and high: 95 % bootstrap interval "
        "of the seconds. Over first-order: seconds over those of the best optimizer without "
        "Kronecker factors (no K-FAC, Shampoo or SOAP)"
    )
    return Table(title, columns, rows, [note])
