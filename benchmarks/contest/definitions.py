"""Eight definitions of a contest's score, so that a reader sees what the ranking depends on.

They were fixed before the first run of the contest. Each maps optimizers to scores of which a
higher one is better. Times are medians over studies; a miss is infinite.
"""

import math
from collections.abc import Mapping
from statistics import fmean, median

from kfac_bench.benchmark.performance_profile import TAU_MAX, Times, ratios, scores
from kfac_bench.report.tables import Table, Value

CAP = 4.0
"""The largest r of the geometric mean, which a miss has."""
LEFT_OUT = 2
"""Tasks that the definition without the best tasks leaves out."""


def geometric_mean(times: Times) -> dict[str, float]:
    """Return one over the geometric mean of r, with r at most ``CAP``."""
    return {
        name: math.exp(-fmean(math.log(min(r, CAP)) for r in of_tasks.values()))
        for name, of_tasks in ratios(times).items()
    }


def mean_rank(times: Times) -> dict[str, float]:
    """Return minus the mean rank; equal times share the mean of their ranks."""
    found = ratios(times)
    return {
        name: -fmean(
            1 + sum(o[task] < r for o in found.values())
            + (sum(o[task] == r for o in found.values()) - 1) / 2
            for task, r in of_tasks.items()
        )
        for name, of_tasks in found.items()
    }  # fmt: skip


def without_best_tasks(times: Times) -> dict[str, float]:
    """Return the area of each optimizer without the two tasks on which its own r is smallest."""
    return {
        name: fmean(
            max(0.0, TAU_MAX - r) / (TAU_MAX - 1) for r in sorted(of_tasks.values())[LEFT_OUT:]
        )
        for name, of_tasks in ratios(times).items()
        if len(of_tasks) > LEFT_OUT
    }


def best_trials(trials: Mapping[str, Mapping[str, Mapping[int, list[float]]]]) -> Times:
    """Return AlgoPerf's time: the median over studies of the fastest trial of each.

    Args:
        trials: Task to optimizer to study to the seconds of its trials.
    """
    return {
        task: {name: median(map(min, studies.values())) for name, studies in row.items()}
        for task, row in trials.items()
    }


def table(seconds: Times, steps: Times, trials: Times) -> Table:
    """Return a row per optimizer with its score by each definition and its rank in brackets.

    Args:
        seconds: Task to optimizer to the median seconds to the target.
        steps: The same in steps.
        trials: See :func:`best_trials`.
    """
    by_definition = {
        f"area to {TAU_MAX:g}": scores(seconds),
        "to 2": scores(seconds, 2.0),
        "to 1.5": scores(seconds, 1.5),
        "geometric mean": geometric_mean(seconds),
        "mean rank": mean_rank(seconds),
        "steps": scores(steps),
        "without its best two tasks": without_best_tasks(seconds),
        "best trials": scores(trials),
    }
    order = by_definition[f"area to {TAU_MAX:g}"]
    rows: list[list[Value]] = []
    for name in sorted(order, key=lambda n: (-order[n], n)):
        cells = (_with_rank(of_all, name) for of_all in by_definition.values())
        rows.append([name, *cells])
    notes = [
        f"Area: below the profile, for tau from 1 to {TAU_MAX:g}, 2 or 1.5, divided by its width. "
        f"Geometric mean: one over that of r, with r at most {CAP:g}. Mean rank: 1 is the fastest",
        "Steps: the area to 4 of steps instead of seconds. Best trials: the area to 4 of the "
        "median over studies of the fastest trial, as in AlgoPerf",
        "In brackets: the rank of the optimizer",
    ]
    return Table("Scores by eight definitions", ["optimizer", *by_definition], rows, notes)


def _with_rank(of_all: Mapping[str, float], name: str) -> str:
    if name not in of_all:
        return ""
    rank = 1 + sum(value > of_all[name] for value in of_all.values())
    return f"{abs(of_all[name]):.3g} ({rank})"
