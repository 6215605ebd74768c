"""How raw moments are scaled to become the factors A and G."""

from __future__ import annotations

from collections.abc import Callable

Scale = Callable[[int, float, bool], tuple[float, float]]
"""(samples N, shared positions s per sample, is a convolution) -> factors of raw A and raw G."""


def _kfc(n: int, s: float, conv: bool) -> tuple[float, float]:
    return 1 / (n * s), float(n)


def _sc20(n: int, s: float, conv: bool) -> tuple[float, float]:
    return (1 / (n * s**2), n * s) if conv else (1 / (n * s), n * s)


def _kaisa(n: int, s: float, conv: bool) -> tuple[float, float]:
    return (1 / (n * s**3), 1 / (n * s**3)) if conv else (1 / (n * s), 1 / (n * s))


CONVENTIONS: dict[str, Scale] = {"kfc": _kfc, "sc20": _sc20, "kaisa": _kaisa}
"""How raw moments (sum a a^T, sum g g^T; g the gradient of a loss that is a mean over N samples,
s shared positions each) become A and G. The same damping means another algorithm under each.

``kfc``: A = mean over samples and positions, G = N sum g g^T: the mean over samples of per-sample
gradients' moments, summed over positions; independent of batch size. The product is that of
Grosse & Martens 2016 (eq. 31 ff.) and of K-FAC-expand (Eschenhagen et al. 2023).
``sc20``: the code behind the paper's ResNet tables: convolutions' patches divided by s, g times
N s. ``kaisa``: SC21's code: both divided by s, g not multiplied by N, so G shrinks with the batch
size; a rank's G is that of its own part of the batch, so results depend on the number of ranks, as
SC21's do. In both, a Linear layer's positions count as samples.
"""
