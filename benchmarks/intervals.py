"""What an interval of steps comes to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure import KINDS, Timing
from kfac_bench.errors import UsageError


def mean_step(seconds: Mapping[str, float], factor_freq: int, update_freq: int) -> float:
    """Mean of an interval, from the seconds of each kind of step.

    plain + (factors - plain) / factor_freq + (decompose - factors) / update_freq. Raises
    UsageError unless update_freq is a multiple of factor_freq: a decomposition without new
    factors is no kind of step that was timed.
    """
    if factor_freq < 1 or update_freq < 1 or update_freq % factor_freq:
        raise UsageError(f"setting {factor_freq},{update_freq}: the second must be a multiple")
    plain, factors, decompose = (seconds[kind] for kind in KINDS)
    return plain + (factors - plain) / factor_freq + (decompose - factors) / update_freq


def combine(timing: Timing, method: str, factor_freq: int, update_freq: int) -> dict[str, Any]:
    """The mean step of an interval from medians over rounds, and over SGD's; per round, too."""
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
    """Mean, median and slowest step without the first, which is apart."""
    first, rest = seconds[0], seconds[1:]
    median = statistics.median(rest)
    return {
        "mean_s": statistics.fmean(rest),
        "median_s": median,
        "slowest_s": max(rest),
        "slowest_over_median": max(rest) / median,
        "first_s": first,
    }
