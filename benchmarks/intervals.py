"""Intervals: the mean step of an interval, put together from the measured kinds of steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure import KINDS, Timing
from kfac_bench.errors import UsageError


def mean_step(seconds: Mapping[str, float], factor_freq: int, update_freq: int) -> float:
    """Return the mean step of an interval from the seconds of each kind of step.

    The mean is plain + (factors - plain) / factor_freq + (decompose - factors) / update_freq.

    Raises:
        UsageError: If update_freq is no multiple of factor_freq. Some decompositions would then
            have no new factors, and such a step is not measured.
    """
    if factor_freq < 1 or update_freq < 1 or update_freq % factor_freq:
        raise UsageError(
            f"setting {factor_freq},{update_freq}: the second must be a multiple of the first"
        )
    plain, factors, decompose = (seconds[kind] for kind in KINDS)
    return plain + (factors - plain) / factor_freq + (decompose - factors) / update_freq


def combine(timing: Timing, method: str, factor_freq: int, update_freq: int) -> dict[str, Any]:
    """Return the mean step of an interval and its ratio to SGD, by medians and by round."""
    kinds = timing.methods[method]
    medians = {kind: statistics.median(kinds[kind]) for kind in KINDS}
    mean_s = mean_step(medians, factor_freq, update_freq)
    per_round = [
        mean_step({kind: kinds[kind][i] for kind in KINDS}, factor_freq, update_freq) / sgd_s
        for i, sgd_s in enumerate(timing.sgd_s)
    ]
    ratio = mean_s / statistics.median(timing.sgd_s)
    return {
        "setting": [factor_freq, update_freq],
        "mean_s": mean_s,
        "ratio": ratio,
        "low": min(per_round),
        "high": max(per_round),
        "per_round": per_round,
    }


def summarize(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, median and slowest step without the first step, and the first step."""
    first, rest = seconds[0], seconds[1:]
    median = statistics.median(rest)
    return {
        "mean_s": statistics.fmean(rest),
        "median_s": median,
        "slowest_s": max(rest),
        "slowest_over_median": max(rest) / median,
        "first_s": first,
    }
