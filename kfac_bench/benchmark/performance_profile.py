"""Performance profiles of optimizers over tasks, and the score that AlgoPerf makes of them.

After Dahl et al. 2023, "Benchmarking Neural Network Training Algorithms" (profiles: Dolan & Moré
2002). On each task an optimizer's ratio is r = t / best t; its profile rho(tau) is the share of
tasks with r <= tau, its score the area below it for tau in [1, 4] over the width: 1 for the best on
each task, 0 for one that misses or takes four times the best's time on each. A time is infinite
where the target was missed, or the task was not run. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from kfac_bench.record.runs import Setting, option, target
from kfac_bench.record.score import bootstrap_median, steps_to_target, time_to_target_s
from kfac_bench.report.tables import Table, Value

TAU_MAX = 4.0
"""Where the score's area ends, as in AlgoPerf."""

KRONECKER = ("shampoo", "soap")
"""Optimizers of which Kronecker factors are a part: not first-order."""

Times = Mapping[str, Mapping[str, float]]
"""Task to optimizer to seconds (or steps) to target."""
Ratios = dict[str, dict[str, float]]
"""Optimizer to task to r."""
Profile = list[tuple[float, float]]
"""Corners of a step function: (tau, the share of tasks from there on), tau rising from 1."""


def medians(settings: Iterable[Setting], *, steps: bool = False) -> dict[str, dict[str, float]]:
    """Seconds, or steps, to target: medians over the seeds of each setting that has a target."""
    measure = steps_to_target if steps else time_to_target_s
    found: dict[str, dict[str, float]] = {}
    for setting in settings:
        if target(setting.runs[0]) is not None:
            values = [max(0.0, measure(run)) for run in setting.runs]
            found.setdefault(setting.task, {})[setting.optimizer] = bootstrap_median(values)[0]
    return found


def ratios(times: Times) -> Ratios:
    """Find r of each optimizer on each task; infinite for all on a task that nobody solved."""
    names = dict.fromkeys(name for row in times.values() for name in row)
    best = {task: min(row.values(), default=math.inf) for task, row in times.items()}
    return {
        name: {task: _ratio(row.get(name, math.inf), best[task]) for task, row in times.items()}
        for name in names
    }


def _ratio(time: float, best: float) -> float:
    if math.isinf(time):
        return math.inf
    if time == best:  # also 0 of 0
        return 1.0
    return time / best if best > 0 else math.inf


def profiles(times: Times) -> dict[str, Profile]:
    """Find rho of each optimizer. The best of all comes first: by score, then by name."""
    made = {name: _profile(list(r.values())) for name, r in ratios(times).items()}
    order = scores(times)
    return {name: made[name] for name in sorted(made, key=lambda n: (-order[n], n))}


def _profile(values: Sequence[float]) -> Profile:
    corners = sorted({1.0, *(v for v in values if math.isfinite(v))})
    return [(tau, sum(v <= tau for v in values) / len(values)) for tau in corners]


def scores(times: Times) -> dict[str, float]:
    """Area below rho for tau in [1, 4], over 3: the mean over tasks of max(0, 4 - r) / 3."""
    return {
        name: fmean(max(0.0, TAU_MAX - r) / (TAU_MAX - 1) for r in of_tasks.values())
        for name, of_tasks in ratios(times).items()
    }


def table(times: Times, title: str = "Performance profiles", unit: str = "time") -> Table:
    """A row per optimizer, the best first: its score, the tasks it solved, r on each task.

    ``unit`` is what the times are of: time or steps.
    """
    found, score = ratios(times), scores(times)
    tasks = list(times)
    rows: list[list[Value]] = []
    for name in profiles(times):
        solved = sum(map(math.isfinite, found[name].values()))
        rows.append([name, score[name], solved, *(found[name][task] for task in tasks)])
    note = (
        f"r: {unit} to target over the best's; medians over seeds, inf where half missed. "
        f"Score: area below the profile for tau in [1, {TAU_MAX:g}], 1 at most"
    )
    return Table(title, ["optimizer", "score", "solved", *(f"r, {t}" for t in tasks)], rows, [note])


def _is_first_order(config: Mapping[str, Any]) -> bool:
    name = option(config, "optimizer", "name")
    return not option(config, "kfac", "enabled") and name not in KRONECKER


def times_table(settings: Sequence[Setting], title: str = "Time to target") -> Table:
    """A row per setting that has a target: steps and seconds, medians with their 95 % intervals.

    The last column is the seconds over those of the task's best first-order optimizer: without
    K-FAC, and none of :data:`KRONECKER`. The clip alone (``kfac.method=identity``) counts as K-FAC
    here: it is a control.
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
            over = _ratio(seconds[s.task][s.optimizer], first_order.get(s.task, math.inf))
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
        "Medians over seeds, a miss being inf; low and high: 95 % bootstrap interval of the "
        "seconds; over first-order: seconds over those of the best optimizer that has no Kronecker "
        "factors: without K-FAC, and neither Shampoo nor SOAP"
    )
    return Table(title, columns, rows, [note])
