"""Intervals of scores, compared with their definition computed in plain Python."""

import math
import random
import statistics

import pytest

from benchmarks.contest import contest_tables
from kfac_bench.benchmark import performance_profile

INF = math.inf
TIMES = {
    "a": {"A": [1.0, 1.2, 0.9, 1.1, 1.0], "B": [2.0, 1.0, 3.0, 2.5, 1.5]},
    "b": {"A": [4.0, 5.0, INF, INF, 3.0], "B": [2.0, 2.0, 2.1, 1.9, 2.0]},
    "c": {"A": [INF] * 3, "B": [INF] * 3},
}


def by_definition(times, name, resamples=4000):
    draw = random.Random(1)
    scores = []
    for _ in range(resamples):
        medians = {
            task: {
                n: statistics.median(draw.choices(values, k=len(values)))
                for n, values in row.items()
            }
            for task, row in times.items()
        }
        scores.append(performance_profile.scores(medians)[name])
    scores.sort()
    return scores[int(0.025 * resamples)], scores[int(0.975 * resamples)]


@pytest.mark.parametrize("name", ["A", "B"])
def test_intervals_equal_those_of_the_definition(name):
    found = contest_tables.score_intervals(TIMES)[name]
    assert found.score == performance_profile.scores(contest_tables.medians(TIMES))[name]
    low, high = by_definition(TIMES, name)
    assert found.low == pytest.approx(low, abs=0.02)
    assert found.high == pytest.approx(high, abs=0.02)
    assert found.low < found.score < found.high or name == "B"


def test_equal_times_have_no_interval():
    times = {"a": {"A": [2.0] * 5, "B": [4.0] * 5}, "b": {"A": [9.0], "B": [3.0], "C": [3.0]}}
    found = contest_tables.score_intervals(times)
    assert found["B"] == contest_tables.ScoreInterval(*[pytest.approx((2 / 3 + 1) / 2)] * 3)
    assert found["C"].score == found["C"].low == found["C"].high == 0.5  # it did not run on a


def test_zero_times_and_unsolved_tasks_have_scores():
    times = {"a": {"A": [0.0], "B": [1.0]}, "b": {"A": [INF], "B": [INF]}}
    found = contest_tables.score_intervals(times)
    assert (found["A"].low, found["A"].high) == (0.5, 0.5)
    assert (found["B"].low, found["B"].high) == (0.0, 0.0)
