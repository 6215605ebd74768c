"""A sweep: the simulated step of one workload for several world sizes and strategies.

The plan of a step is that of this package, or that of the code that Pauloski et al. released for
their ResNets (``KFAC.step`` of branch kfac-opt). The released code gives layers to ranks in turn.
If there are more ranks than layers, A and G of a layer go to two ranks, one after the other. Each
stage computes first and sends afterwards.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kfac_bench.core.planning.layer_spec import LayerSpec
from kfac_bench.core.planning.plan import STRATEGY_TABLE, Message, Op, Placement, Plan
from kfac_bench.core.planning.planner import (
    BATCH_NUMEL,
    BUCKET_NUMEL,
    cubic_cost,
    divide,
    make_plan,
    measured_cost,
    place_in_turn,
)
from kfac_bench.core.planning.stage_ops import StageOps
from kfac_bench.errors import UsageError
from kfac_bench.simulate.conduct import SC20_CALLS, Conduct, conduct_of
from kfac_bench.simulate.hardware import Hardware
from kfac_bench.simulate.step import StepTime, Workload, step_time

SGD = "sgd"


@dataclass(frozen=True, slots=True)
class Variant:
    """A strategy, with its share of gradient workers; :data:`SGD` stands for no K-FAC."""

    strategy: str
    fraction: float | None = None

    @property
    def label(self) -> str:
        """The text that the command line takes: ``hybrid_opt@1/4``."""
        if self.fraction is None:
            return self.strategy
        return f"{self.strategy}@{Fraction(self.fraction).limit_denominator(1 << 20)}"


def variant(text: str) -> Variant:
    """Return the variant that `text` names, such as ``comm_opt`` or ``hybrid_opt@1/4``.

    Raises :class:`UsageError` for an unknown strategy, or a fraction that the strategy cannot have.
    """
    name, at, share = text.partition("@")
    if name != SGD and name not in STRATEGY_TABLE:
        known = ", ".join((SGD, *STRATEGY_TABLE))
        raise UsageError(f"strategy {text}: unknown; choose one of {known}")
    if not at:
        return Variant(name)
    if name == SGD or not STRATEGY_TABLE[name].adjustable:
        raise UsageError(f"strategy {text}: {name} takes no fraction; remove @{share}")
    try:
        fraction = float(Fraction(share))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise UsageError(f"strategy {text}: write the fraction as 1/4 or 0.25") from None
    if not 0 < fraction <= 1:
        raise UsageError(f"strategy {text}: the fraction must be in (0, 1]")
    return Variant(name, fraction)


@dataclass(frozen=True, slots=True)
class Intervals:
    """The steps between two runs of K-FAC's stages."""

    factors: float
    decompose: float
    at: int | None = None
    """World size that the intervals belong to. On another world size the stages run as often per
    epoch, so their intervals shrink as the world size grows. None: the same on all world sizes."""

    def of(self, world_size: int) -> tuple[float, float]:
        """Return the intervals of the factors and of the decompositions, at least 1."""
        scale = 1.0 if self.at is None else self.at / world_size
        return max(1.0, self.factors * scale), max(1.0, self.decompose * scale)


@dataclass(frozen=True, slots=True)
class SimulatedCell:
    """The simulated step of one variant on one number of ranks."""

    variant: Variant
    world_size: int
    examples: int
    """Examples of all ranks in a step."""
    intervals: tuple[float, float]
    """Steps between two runs of the factors, and of the decompositions."""
    time: StepTime
    overhead_s: float = 0.0
    """Seconds of each epoch beside its steps."""
    is_validated: bool = False
    """Whether the variant on this machine is one that was compared with real times."""

    @property
    def step_s(self) -> float:
        """The mean seconds of a step."""
        if self.variant.strategy == SGD:
            return self.time.sgd_s
        return self.time.average_s(*self.intervals)

    def epoch_s(self, examples: int) -> float:
        """Return the seconds of an epoch of ``examples``. An incomplete last batch is left out."""
        return self.steps(examples) * self.step_s + self.overhead_s

    def steps(self, examples: int) -> int:
        """Return the steps of an epoch of ``examples``."""
        return max(1, examples // self.examples)

    def epoch_rate(self, examples: int | None) -> float:
        """Return the throughput of all ranks in an epoch of ``examples``; None: in their steps."""
        if examples is None:
            return self.examples / self.step_s
        return self.steps(examples) * self.examples / self.epoch_s(examples)


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
    """Simulate each variant on each world size.

    This is weak scaling: each rank has the workload's examples on any number of ranks.

    Args:
        work: What one rank does in a step.
        hardware: The machine.
        variants: The strategies.
        world_sizes: The numbers of ranks.
        intervals: How often K-FAC's stages run.
        method: ``eigen`` or ``inverse``.
        conduct: How the implementation uses the machine; None: as the hardware file says.
        itemsize: Bytes of an element of factors and decompositions.
    """
    cells = []
    is_whole = not any(spec.a_blocks or spec.g_blocks for spec in work.layers)
    for world_size in world_sizes:
        for each in variants:
            own = conduct or conduct_of(hardware.conduct, each.strategy, method, is_whole=is_whole)
            plan = None
            if each.strategy != SGD and own.places_in_turn:
                plan = released_plan(work.layers, world_size, each.strategy)
            elif each.strategy != SGD:
                # Ranks that crowd a node are processors, which gain nothing from batches.
                numel = BATCH_NUMEL if own.batches and not hardware.crowding else 0
                plan = plan_of(work, each, world_size, method, itemsize, numel)
            time = step_time(work, world_size, hardware, plan, own)
            examples = work.examples * world_size
            every = intervals.of(world_size)
            is_validated = hardware.errors is not None and own is not SC20_CALLS
            cells.append(
                SimulatedCell(
                    each, world_size, examples, every, time, hardware.epoch_s, is_validated
                )
            )
    return cells


def plan_of(
    work: Workload,
    each: Variant,
    world_size: int,
    method: str,
    itemsize: int = 4,
    batch_numel: int = 0,
) -> Plan:
    """Return the plan that real ranks would execute.

    Raises :class:`UsageError` if the strategy cannot run on so many ranks.
    """
    try:
        return make_plan(
            work.layers,
            world_size,
            strategy=each.strategy,
            grad_worker_fraction=each.fraction,
            method=method,
            cost=measured_cost(method),
            itemsize=itemsize,
            batch_numel=batch_numel,
        )
    except ValueError as error:
        raise UsageError(f"{each.label} on {world_size} ranks: {error}") from None


def efficiency(
    cells: Sequence[SimulatedCell], cell: SimulatedCell, examples: int | None = None
) -> float:
    """Return the throughput per rank over that of the same variant on its fewest ranks.

    Args:
        cells: Cells that contain the one on the fewest ranks.
        cell: The cell to compare with it.
        examples: Examples of an epoch, whose overhead then counts; None: only steps count.
    """
    base = min((c for c in cells if c.variant == cell.variant), key=lambda c: c.world_size)
    each, first = (c.epoch_rate(examples) / c.world_size for c in (cell, base))
    return each / first


def fastest(cells: Sequence[SimulatedCell], error: float) -> list[SimulatedCell]:
    """Return the cells whose steps are as short as the shortest within a relative error.

    The shortest step is the first.
    """
    ordered = sorted(cells, key=lambda cell: cell.step_s)
    return [cell for cell in ordered if cell.step_s <= (1 + error) * ordered[0].step_s]


def hidden_ranks(cells: Sequence[SimulatedCell]) -> list[int]:
    """Return the numbers of ranks, above 1, on which backward hides the whole exchange of SGD.

    A simulation has no slow ranks and no congestion, so real SGD is then slower.
    """
    sgd = [cell for cell in cells if cell.variant.strategy == SGD and cell.world_size > 1]
    return [cell.world_size for cell in sgd if not cell.time.gradients_s]


RELEASED_METHOD = "eigen"


def released_plan(layers: Sequence[LayerSpec], world_size: int, strategy: str) -> Plan:
    """Return the plan of ``comm_opt`` (K-FAC-opt) or ``layer_wise`` (K-FAC-lw).

    Raises:
        UsageError: The released code of the ResNets has no such strategy.
    """
    if strategy == "layer_wise":
        placements = place_in_turn(layers, world_size)
    elif strategy == "comm_opt":
        placements = _factors_in_turn(layers, world_size)
    else:
        raise UsageError(
            f"strategy {strategy}: the released code of the ResNets has comm_opt and layer_wise; "
            "choose one of them, or remove conduct=sc20"
        )
    row = STRATEGY_TABLE[strategy]
    ops = StageOps(placements, row, world_size, RELEASED_METHOD, BUCKET_NUMEL, 0, 4)
    slices = ops.slices(divide(placements, RELEASED_METHOD, 1, cubic_cost))
    return Plan(
        world_size,
        strategy,
        RELEASED_METHOD,
        placements,
        factors=_work_first(ops.factors()),
        slices=tuple(_work_first(part) for part in slices),
        precondition=_work_first(ops.precondition()),
    )


def _factors_in_turn(layers: Sequence[LayerSpec], world_size: int) -> tuple[Placement, ...]:
    """Place factors as ``rank_iter`` of the released code does; all ranks precondition."""
    everyone = tuple(range(world_size))
    if world_size > len(layers):
        pairs = [(2 * i % world_size, (2 * i + 1) % world_size) for i in range(len(layers))]
    else:
        pairs = [(i % world_size, i % world_size) for i in range(len(layers))]
    return tuple(Placement(s, pair, everyone) for s, pair in zip(layers, pairs, strict=True))


def _work_first(ops: Iterable[Op]) -> tuple[Op, ...]:
    return tuple(sorted(ops, key=lambda op: isinstance(op, Message)))
