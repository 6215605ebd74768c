"""The cost of decomposing a factor, by which ranks and steps share the work."""

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import cache

Cost = Callable[[int], float]
"""The cost of decomposing an [n, n] matrix, in any unit."""

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
"""Seconds of one decomposition, by method and size n of an [n, n] factor.

Measured by benchmarks/decompositions.py on one thread of an AMD EPYC, torch 2.14.1. Only their
ratios matter.
"""


def cubic_cost(n: int) -> float:
    """Return n^3: the work of decomposing an [n, n] matrix, up to a constant."""
    return float(n) ** 3


def measured_cost(method: str) -> Cost:
    """Return a cost in nanoseconds that interpolates :data:`SECONDS`.

    Between two sizes of the table, and beyond its ends, the logarithm of the time is linear in the
    logarithm of the size. The table of a CPU serves every device: ranks must agree on the cost,
    and on every device small matrices cost more than n^3 predicts.
    """
    seconds = SECONDS["inverse" if method == "inverse" else "eigen"]
    sizes = list(seconds)

    @cache
    def cost(n: int) -> float:
        i = min(max(bisect_left(sizes, n), 1), len(sizes) - 1)
        low, high = sizes[i - 1], sizes[i]
        slope = math.log(seconds[high] / seconds[low]) / math.log(high / low)
        # Whole numbers: a sum of costs must not depend on its order, or plans could differ.
        return float(round(1e9 * seconds[low] * (n / low) ** slope))

    return cost
