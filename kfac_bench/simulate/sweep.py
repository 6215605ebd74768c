"""A workload over world sizes and strategies: a table of seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kfac_bench.core.planning.cost import measured_cost
from kfac_bench.core.planning.plan import STRATEGY_TABLE, Plan
from kfac_bench.core.planning.planner import make_plan
from kfac_bench.errors import UsageError
from kfac_bench.simulate.hardware import Hardware
from kfac_bench.simulate.step import Conduct, StepTime, Workload, step_time

SGD = "sgd"


@dataclass(frozen=True, slots=True)
class Variant:
    """A strategy, and of what share of ranks; :data:`SGD` is none."""

    strategy: str
    fraction: float | None = None

    @property
    def label(self) -> str:
        """As on the command line: ``hybrid_opt@1/4``."""
        if self.fraction is None:
            return self.strategy
        return f"{self.strategy}@{Fraction(self.fraction).limit_denominator(1 << 20)}"


def variant(text: str) -> Variant:
    """``comm_opt`` or ``hybrid_opt@1/4``; raises :class:`UsageError`."""
    name, at, share = text.partition("@")
    if name != SGD and name not in STRATEGY_TABLE:
        known = ", ".join((SGD, *STRATEGY_TABLE))
        raise UsageError(f"strategies={text}: choose of {known}")
    if not at:
        return Variant(name)
    if name == SGD or not STRATEGY_TABLE[name].adjustable:
        raise UsageError(f"strategies={text}: {name} has no fraction to choose")
    try:
        fraction = float(Fraction(share))
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"strategies={text}: write the fraction as 1/4 or 0.25") from None
    if not 0 < fraction <= 1:
        raise UsageError(f"strategies={text}: the fraction must be in (0, 1]")
    return Variant(name, fraction)


@dataclass(frozen=True, slots=True)
class Intervals:
    """Steps between two runs of K-FAC's stages."""

    factors: float
    decompose: float
    at: int | None = None
    """The world size that they belong to: elsewhere as often per epoch, so inversely to it."""

    def of(self, world_size: int) -> tuple[float, float]:
        """Those of the factors and of the decompositions, at least 1."""
        scale = 1.0 if self.at is None else self.at / world_size
        return max(1.0, self.factors * scale), max(1.0, self.decompose * scale)


@dataclass(frozen=True, slots=True)
class SimulatedCell:
    """One variant on one number of ranks."""

    variant: Variant
    world_size: int
    examples: int
    """Of all ranks, in a step."""
    intervals: tuple[float, float]
    time: StepTime

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        if self.variant.strategy == SGD:
            return self.time.sgd_s
        return self.time.average_s(*self.intervals)

    @property
    def examples_per_s(self) -> float:
        """Of all ranks."""
        return self.examples / self.step_s

    def epoch_s(self, examples: int) -> float:
        """Seconds for ``examples``; the last batch, if smaller, is left out."""
        return max(1, examples // self.examples) * self.step_s


def sweep(
    work: Workload,
    hardware: Hardware,
    variants: Sequence[Variant],
    world_sizes: Sequence[int],
    intervals: Intervals,
    method: str = "eigen",
    conduct: Conduct | None = None,
    itemsize: int = 4,
) -> list[SimulatedCell]:
    """Weak scaling: each rank has the workload's examples, whatever the number of ranks.

    ``itemsize`` is that of the factors and decompositions.
    """
    cells = []
    for world_size in world_sizes:
        for each in variants:
            plan = (
                None if each.strategy == SGD else plan_of(work, each, world_size, method, itemsize)
            )
            time = step_time(work, world_size, hardware, plan, conduct)
            examples = work.examples * world_size
            cells.append(SimulatedCell(each, world_size, examples, intervals.of(world_size), time))
    return cells


def plan_of(work: Workload, each: Variant, world_size: int, method: str, itemsize: int = 4) -> Plan:
    """The plan that ranks would execute; raises :class:`UsageError`."""
    try:
        return make_plan(
            work.layers,
            world_size,
            strategy=each.strategy,
            grad_worker_fraction=each.fraction,
            method=method,
            cost=measured_cost(method),
            itemsize=itemsize,
        )
    except ValueError as error:
        raise UsageError(f"world_size={world_size}: {error}") from None


def efficiency(cells: Sequence[SimulatedCell], cell: SimulatedCell) -> float:
    """Throughput per rank, against the same variant's on the fewest ranks."""
    base = min((c for c in cells if c.variant == cell.variant), key=lambda c: c.world_size)
    each = cell.examples_per_s / cell.world_size
    return each / (base.examples_per_s / base.world_size)
