"""What a piece of work takes on one rank."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one rank, sustained."""

    step_flops_per_s: Mapping[str, float]
    """Forward and backward, by family of models; ``default`` for the others."""
    factor_flops_per_s: float
    precondition_flops_per_s: float
    eigen_s: Mapping[int, float]
    """Seconds to decompose an [n, n] matrix, by n; of one n alone, n^3 scales it."""
    inverse_s: Mapping[int, float]
    step_s: float = 0.0
    """What each step takes beside its FLOPs: input, launches, Python."""
    op_s: float = 0.0
    """What each of a layer's K-FAC operations takes beside its FLOPs."""

    def step(self, flops: float, family: str) -> float:
        """Seconds of forward and backward."""
        rate = self.step_flops_per_s.get(family, self.step_flops_per_s[DEFAULT])
        return self.step_s + flops / rate

    def decompose(self, n: int, method: str) -> float:
        """Seconds of one [n, n] factor."""
        return interpolate(self.inverse_s if method == "inverse" else self.eigen_s, n)


def interpolate(seconds: Mapping[int, float], n: int) -> float:
    """Straight lines between logarithms of sizes and times, the outer ones prolonged."""
    sizes = sorted(seconds)
    if len(sizes) == 1:
        return seconds[sizes[0]] * math.pow(n / sizes[0], 3)
    i = min(max(bisect_left(sizes, n), 1), len(sizes) - 1)
    low, high = sizes[i - 1], sizes[i]
    slope = math.log(seconds[high] / seconds[low]) / math.log(high / low)
    return seconds[low] * math.pow(n / low, slope)
