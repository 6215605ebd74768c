"""Rates that a hardware file cannot look up, from published minutes on one number of ranks."""

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
"""Of ResNet-50's factors; decompositions of other sizes follow by n^3."""


@dataclass(frozen=True)
class StepMeasurement:
    """Seconds of a mean step of one workload on ``world_size`` ranks."""

    world_size: int
    sgd_s: float
    kfac_s: Mapping[int, float]
    """comm_opt's, by steps between decompositions, factors ten times as often."""
    efficiency: tuple[int, int, float]
    """Of SGD: from as many ranks, at as many, which share."""


def calibrate(
    known: Hardware, work: Workload, found: StepMeasurement, conduct: Conduct
) -> Hardware:
    """``known`` with four rates of ``found``: one number for each of two, three for the others.

    SGD's efficiency gives ``coordination_s``; its seconds ``step_s``, what its FLOPs and messages
    leave. Those of K-FAC are a straight line over 1 / interval: it rises by what an interval's
    factors and decompositions take together, and starts with preconditioning. The FLOPs of that
    give the rate of products, of factors too; decompositions get the rest.
    """

    def sgd(coordination: float) -> Hardware:
        net = replace(known.network, coordination_s=coordination)
        bare = replace(known, network=net, rates=replace(known.rates, step_s=0.0))
        left = found.sgd_s - step_time(work, found.world_size, bare).sgd_s
        return replace(bare, rates=replace(bare.rates, step_s=left))

    def lost(coordination: float) -> float:
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
    """Slope and start of the least squares' straight line."""
    x0, y0 = (fmean(each) for each in zip(*points, strict=True))
    slope = sum((x - x0) * (y - y0) for x, y in points) / sum((x - x0) ** 2 for x, _ in points)
    return slope, y0 - slope * x0


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function of a positive number is 0, by bisection of its logarithm."""
    if not f(low) <= 0 <= f(high):
        raise ValueError(f"no value from {low:g} to {high:g} explains what was measured")
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if f(middle) > 0 else (middle, high)
    return low
