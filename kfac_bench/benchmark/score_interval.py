"""Intervals of scores and ratios: how far they could differ with other seeds.

A resample draws, for each task and optimizer, as many seeds as there were, with replacement. From
each resample the medians, the best time of each task, the ratios and the scores are computed again.
The interval holds the middle 95 % of the results. All functions are pure.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kfac_bench.benchmark import performance_profile
from kfac_bench.benchmark.performance_profile import TAU_MAX
from kfac_bench.record.score import CONFIDENCE

RESAMPLES = 2_000

SeedTimes = Mapping[str, Mapping[str, Sequence[float]]]
"""Task to optimizer to the times of its seeds; a miss is infinite."""


@dataclass(frozen=True)
class ScoreInterval:
    """A profile score, and the ends of its 95 % interval."""

    score: float
    low: float
    high: float


def medians(times: SeedTimes) -> dict[str, dict[str, float]]:
    """Return the median time of each optimizer on each task."""
    return {
        task: {name: float(np.median(values)) for name, values in row.items()}
        for task, row in times.items()
    }


def score_intervals(times: SeedTimes, tasks: Collection[str]) -> dict[str, ScoreInterval]:
    """Return the score of each optimizer over these tasks, with its interval.

    An optimizer without runs on a task has missed the task.
    """
    chosen = {task: row for task, row in times.items() if task in tasks}
    if not chosen:
        return {}
    random = np.random.default_rng(0)
    # Of each optimizer the gains of all tasks: 1 for r = 1, and 0 for r of 4 or more.
    gains: dict[str, list[np.ndarray]] = {name: [] for row in chosen.values() for name in row}
    for row in chosen.values():
        resampled = {name: _medians(row.get(name, [math.inf]), random) for name in gains}
        best = np.min(list(resampled.values()), axis=0)
        for name, values in resampled.items():
            gains[name].append(_gain(values, best))
    exact = performance_profile.scores(medians(chosen))
    tail = (1 - CONFIDENCE) / 2
    found = {}
    for name, of_tasks in gains.items():
        scores = np.sort(np.mean(of_tasks, axis=0))
        low, high = (float(scores[round(share * (RESAMPLES - 1))]) for share in (tail, 1 - tail))
        found[name] = ScoreInterval(exact[name], low, high)
    return found


def _medians(values: Sequence[float], random: np.random.Generator) -> np.ndarray:
    """Return the median of each resample of the values."""
    draws = random.integers(len(values), size=(RESAMPLES, len(values)))
    return np.asarray(np.median(np.array(values, dtype=np.float64)[draws], axis=1))


def _gain(times: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Return max(0, 4 - r) / 3; 0 for a miss, also on a task that nobody solved."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(times == best, 1.0, times / best)
    ratio = np.where(np.isinf(times) | np.isnan(ratio), math.inf, ratio)
    return np.asarray(np.maximum(0.0, TAU_MAX - ratio) / (TAU_MAX - 1))
