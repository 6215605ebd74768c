"""Calibration: the rates that no data sheet states, from published times on one number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from kfac_bench.core.planning.estimate import flops
from kfac_bench.core.planning.ops import Precondition
from kfac_bench.simulate.hardware import Hardware
from kfac_bench.simulate.step import Conduct, Workload, step_time
from kfac_bench.simulate.sweep import Variant, plan_of

LARGEST = 4608
"""Size of ResNet-50's largest factor. The times of other sizes follow from its time by n^3."""


@dataclass(frozen=True)
class StepMeasurement:
    """Published seconds of a mean step of one workload on ``world_size`` ranks."""

    world_size: int
    sgd_s: float
    kfac_s: Mapping[int, float]
    """Seconds of comm_opt by the steps between decompositions. Factors run ten times as often."""
    efficiency: tuple[int, int, float]
    """Scaling efficiency of SGD: the fewer ranks, the more ranks, the efficiency."""


def calibrate(
    known: Hardware, work: Workload, found: StepMeasurement, conduct: Conduct
) -> Hardware:
    """Return ``known`` with four rates that explain the published times ``found``.

    * ``coordination_s`` follows from the efficiency of SGD.
    * ``step_s`` is the part of SGD's seconds that its FLOPs and messages do not explain.
    * K-FAC's seconds are a straight line over 1 / interval. The line starts with preconditioning,
      whose FLOPs give the rate of matrix products, also of factors.
    * The line's slope is the time of an interval's factors and decompositions. What the factors do
      not take is left to the decompositions.

    Raises ValueError if no rates explain the times.
    """

    def sgd(coordination: float) -> Hardware:
        """Return the hardware whose step without K-FAC takes as long as published."""
        net = replace(known.network, coordination_s=coordination)
        bare = replace(known, network=net, rates=replace(known.rates, step_s=0.0))
        left = found.sgd_s - step_time(work, found.world_size, bare).sgd_s
        return replace(bare, rates=replace(bare.rates, step_s=left))

    def lost(coordination: float) -> float:
        """Return the share of throughput per rank that SGD loses on more ranks."""
        hardware = sgd(coordination)
        few, many = (step_time(work, n, hardware).sgd_s for n in found.efficiency[:2])
        return 1 - few / many

    hardware = sgd(_root(lambda c: lost(c) - (1 - found.efficiency[2]), 1e-9, 1e-3))
    if hardware.rates.step_s < 0:
        raise ValueError("the FLOPs and messages of a step take longer than the step")
    slope, start = _line([(1 / k, s) for k, s in found.kfac_s.items()])
    plan = plan_of(work, Variant("comm_opt"), found.world_size, "eigen")
    done = sum(flops(op, "eigen", {}) for op in plan.precondition if isinstance(op, Precondition))
    rate = done / (start - found.sgd_s)

    def with_eigen(seconds: float) -> Hardware:
        # An eigendecomposition has 14/3 times the FLOPs of an inverse.
        inverse = seconds / (14 / 3)
        rates = replace(
            hardware.rates,
            factor_flops_per_s=rate,
            precondition_flops_per_s=rate,
            eigen_s={LARGEST: seconds},
            inverse_s={LARGEST: inverse},
        )
        return replace(hardware, rates=rates)

    def interval(seconds: float) -> float:
        time = step_time(work, found.world_size, with_eigen(seconds), plan, conduct)
        return time.average_s(0.1, 1) - time.average_s(float("inf"), float("inf"))

    return with_eigen(_root(lambda s: interval(s) - slope, 1e-4, 1e4))


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the slope and the start of the least-squares line through the points."""
    x0, y0 = (fmean(each) for each in zip(*points, strict=True))
    slope = sum((x - x0) * (y - y0) for x, y in points) / sum((x - x0) ** 2 for x, _ in points)
    return slope, y0 - slope * x0


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    """Find where a rising function of a positive number is 0, by bisection of its logarithm."""
    if not f(low) <= 0 <= f(high):
        raise ValueError(f"no value from {low:g} to {high:g} explains the published times")
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if f(middle) > 0 else (middle, high)
    return low
