"""What decomposing a factor costs, so that ranks and steps can share the work."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import cache

Cost = Callable[[int], float]
"""Of decomposing an [n, n] matrix, in any unit."""

# fmt: off
SECONDS = {
    "eigen": {
        16: 4.61e-05, 32: 8.7e-05, 64: 1.96e-04, 128: 6.8e-04, 256: 3.36e-03,
        512: 0.0217, 1024: 0.149, 2048: 0.932, 4608: 14.4,
    },
    "inverse": {
        16: 4.56e-05, 32: 5.32e-05, 64: 9.11e-05, 128: 2.87e-04, 256: 1.02e-03,
        512: 6.05e-03, 1024: 0.0372, 2048: 0.243, 4608: 1.91,
    },
}
# fmt: on
"""By method, of one [n, n] factor. Measured by benchmarks/decompositions.py on one thread of an
AMD EPYC, torch 2.14.1; only their ratios count."""


def cubic_cost(n: int) -> float:
    """Work of decomposing an [n, n] matrix, up to a constant."""
    return float(n) ** 3


def measured_cost(method: str) -> Cost:
    """Nanoseconds of decomposing an [n, n] matrix, from :data:`SECONDS`.

    Straight lines between the logarithms of sizes and times, the outer ones prolonged; whole
    numbers, so that sums do not depend on their order. The table is of a CPU, and is used on every
    device: ranks must agree, and small matrices cost more than n^3 says on each.
    """
    seconds = SECONDS["inverse" if method == "inverse" else "eigen"]
    sizes = list(seconds)

    @cache
    def cost(n: int) -> float:
        i = min(max(bisect_left(sizes, n), 1), len(sizes) - 1)
        low, high = sizes[i - 1], sizes[i]
        slope = math.log(seconds[high] / seconds[low]) / math.log(high / low)
        return float(round(1e9 * seconds[low] * (n / low) ** slope))

    return cost
