"""The time of one piece of work on one rank."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from kfac_bench.core.planning.plan import EIGEN_ADAM

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Rates:
    """The sustained rates of one rank."""

    step_flops_per_s: Mapping[str, float]
    """Rate of forward and backward, by model; ``default`` holds for all others."""
    factor_flops_per_s: float
    precondition_flops_per_s: float
    eigen_s: Mapping[int, float]
    """Seconds of the eigendecomposition of an [n, n] matrix, by n. A single n is scaled by n^3."""
    inverse_s: Mapping[int, float]
    """Seconds of the inverse of an [n, n] matrix, by n."""
    qr_s: Mapping[int, float] | None = None
    """Seconds of one QR step from the last eigenvectors, by n. None: ``eigen_s``, because both
    take about 14/3 n^3 FLOPs. Then eigen_adam's decompositions may be simulated too long."""
    step_s: float = 0.0
    """Seconds of each step beside its FLOPs and its calls, such as waiting for images."""
    op_s: float = 0.0
    """Seconds of the host for one call of :class:`.Conduct`: a kernel launch, a message that is
    started or awaited, or a scalar that is read."""

    def step(self, flops: float, family: str) -> float:
        """Return the seconds of forward and backward."""
        rate = self.step_flops_per_s.get(family, self.step_flops_per_s[DEFAULT])
        return self.step_s + flops / rate

    def decompose(self, n: int, method: str) -> float:
        """Return the seconds to decompose one [n, n] factor; eigen_adam takes QR steps."""
        if method == "inverse":
            return interpolate(self.inverse_s, n)
        return interpolate((method == EIGEN_ADAM and self.qr_s) or self.eigen_s, n)


def interpolate(seconds: Mapping[int, float], n: int) -> float:
    """Return the time of size `n`, on straight lines between the logarithms of sizes and times.

    The first and the last line continue beyond the sizes that were measured.
    """
    sizes = sorted(seconds)
    if len(sizes) == 1:
        return seconds[sizes[0]] * math.pow(n / sizes[0], 3)
    # Between sizes[i - 1] and sizes[i]; the limits choose an outer line for an `n` outside of all.
    i = min(max(bisect_left(sizes, n), 1), len(sizes) - 1)
    low, high = sizes[i - 1], sizes[i]
    slope = math.log(seconds[high] / seconds[low]) / math.log(high / low)
    return seconds[low] * math.pow(n / low, slope)
