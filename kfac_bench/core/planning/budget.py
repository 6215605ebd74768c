"""The most faithful plan whose average cost per step stays within a budget.

``KFAC(max_overhead=0.25)`` calls :func:`choose` once, after the first steps. It is a pure function
of shapes, rows and rates, so all ranks choose alike; it measures nothing and needs no torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kfac_bench.core.planning.estimate import factor_numel, flops, wire_bytes_of
from kfac_bench.core.planning.layer_spec import FACTORS, Factor, LayerSpec
from kfac_bench.core.planning.plan import (
    EIGEN_ADAM,
    ComputeFactor,
    Decompose,
    Message,
    Op,
    Plan,
    Precondition,
    Stage,
)

SIZES = (16, 64, 256, 1024)
"""Rows of the matrices whose products and decompositions are timed."""

STEP_CALLS, PRECONDITION_CALLS, WRITE_CALLS, FACTOR_CALLS, DECOMPOSE_CALLS = 60, 18, 35, 45, 35
"""Small operations, in units of :attr:`Rates.call_s`: in each step, for each op of a kind beside
its products, for each layer that is written back, for each factor that is updated or decomposed.
Fitted to the steps of a network with three layers of 64 rows or fewer."""
WRITE_PASSES = 9
"""Number of times that a gradient is read or written in a step, beside the products themselves."""
FACTOR_PASSES = 6
"""Number of times that a factor is read or written when a statistic enters its running average."""
ADAM_CALLS, ADAM_PASSES = 30, 4
"""Small operations of method eigen_adam for each op, and times that it reads or writes a gradient,
beyond those of other methods. AdamW's own are subtracted, because it replaces AdamW's update.
Fitted to a ResNet-50 and an encoder without rotations."""
ROW_PASSES = 3
"""Number of times that a row of a or g is read or written for a statistic."""

BLOCKS = (4096, 2048, 1024, 512, 256)
"""Rows of blocks that may be chosen. Smaller blocks need more steps to the same loss."""
WIDE = 4
"""Columns per row of the wide matrices whose orthogonalization is timed, beside that of square
ones."""
STRETCHES = (1, 2, 5, 10)
"""Factors of both intervals that may be chosen."""


@dataclass(frozen=True)
class UpdateRates:
    """The speed of a rank with orthogonalized updates, by the n of :data:`SIZES`."""

    product_flops: tuple[float, ...]
    """Operations per second of a product, in the precision in which an update is rotated back."""
    square_s: tuple[float, ...]
    """Seconds to orthogonalize an update [n, n]."""
    wide_s: tuple[float, ...]
    """Seconds to orthogonalize an update [n, WIDE n]."""

    def seconds(self, small: int, large: int) -> float:
        """Return the seconds to orthogonalize an update with these sides: linear in ``large``."""
        square, wide = (_interpolated(x, small, power=3) for x in (self.square_s, self.wide_s))
        more = max(0.0, wide - square)  # a measurement may say that less work takes longer
        return square + more * (large / small - 1) / (WIDE - 1)


@dataclass(frozen=True)
class Rates:
    """The speed of a rank (:func:`kfac_bench.core.stepper.measure`)."""

    call_s: float
    """Seconds of an operation on a few elements."""
    bytes_per_s: float
    """Bytes per second that elementwise operations read and write."""
    product_flops: tuple[float, ...]
    """Operations per second of a product [n, n] @ [n, 4n], by the n of :data:`SIZES`."""
    decompose_s: tuple[float, ...]
    """Seconds of one decomposition of an [n, n] factor, by the n of :data:`SIZES`."""
    message_s: float = 0.0
    """Seconds of a message without content; 0 in one process."""
    message_bytes_per_s: float = math.inf
    """Bytes per second on the wire."""
    updates: UpdateRates | None = None
    """The speed of orthogonalized updates; None for methods without them."""

    def product_s(self, operations: float, n: int) -> float:
        """Return the seconds of products with matrices of ``n`` rows."""
        return operations / _interpolated(self.product_flops, n)

    def decomposition_s(self, n: int) -> float:
        """Return the seconds of one decomposition of an [n, n] factor."""
        return _interpolated(self.decompose_s, n, power=3)

    def pass_s(self, numel: float) -> float:
        """Return the seconds in which float32 elements are read or written once."""
        return 4.0 * numel / self.bytes_per_s


def _interpolated(values: Sequence[float], n: int, power: int = 0) -> float:
    """Return the value at ``n``: linear in logarithms, beyond the ends as n^power or constant."""
    if n <= SIZES[0]:
        return values[0]
    if n >= SIZES[-1]:
        return values[-1] * (n / SIZES[-1]) ** power
    i = next(i for i, size in enumerate(SIZES) if size > n)
    part = math.log(n / SIZES[i - 1]) / math.log(SIZES[i] / SIZES[i - 1])
    return float(values[i - 1] ** (1 - part) * values[i] ** part)


@dataclass(frozen=True)
class Choice:
    """The options of the same names as a budget has changed them, with their predicted cost."""

    max_dim: int
    block_size: int | None
    factor_update_freq: int
    update_freq: int
    overhead: float
    """Predicted seconds of K-FAC per step, as a share of a step of the optimizer alone."""

    def __str__(self) -> str:
        return (
            f"K-FAC takes about {100 * self.overhead:.0f} % more time per step with "
            f"max_dim={self.max_dim} block_size={self.block_size} "
            f"factor_update_freq={self.factor_update_freq} update_freq={self.update_freq}"
        )


NO_CHOICE = Choice(0, 0, 0, 0, 0.0)
"""Stands in a saved state for a choice that was not made yet: torch.distributed.checkpoint loads
only what the state of the object has that it loads into."""


def stage_seconds(plan: Plan, rows: Mapping[str, float], rates: Rates) -> dict[Stage, float]:
    """Return the seconds of each stage, on the rank that takes longest.

    Args:
        plan: The work of all ranks.
        rows: By layer, the rows of a and g of one step of one rank.
        rates: The speed of a rank.
    """
    seconds: dict[Stage, list[float]] = {stage: [0.0] * plan.world_size for stage in Stage}
    for stage in Stage:
        for op in plan.ops(stage):
            for rank in op.ranks:
                seconds[stage][rank] += _op_seconds(op, plan.method, rows, rates)
    write = sum(
        rates.call_s * WRITE_CALLS + rates.pass_s(WRITE_PASSES * placement.layer.grad_numel)
        for placement in plan.placements
    )
    longest = {stage: max(each) for stage, each in seconds.items()}
    write += rates.call_s * STEP_CALLS
    return longest | {Stage.PRECONDITION: longest[Stage.PRECONDITION] + write}


def _op_seconds(op: Op, method: str, rows: Mapping[str, float], rates: Rates) -> float:
    match op:
        case ComputeFactor(_, spec, factor):
            n, count = spec.dim(factor), rows.get(spec.name, 0.0)
            work = flops(op, method, {spec.name: count})
            dense = 0.0 if spec.is_diagonal(factor) else rates.product_s(work, n)
            touched = ROW_PASSES * count * n * spec.groups
            touched += FACTOR_PASSES * factor_numel(spec, factor)
            return FACTOR_CALLS * rates.call_s + dense + rates.pass_s(touched)
        case Decompose(_, members):
            seconds = DECOMPOSE_CALLS * rates.call_s
            for spec, f in members:
                if not spec.is_diagonal(f):
                    seconds += spec.groups * rates.decomposition_s(spec.dim(f))
                    seconds += _change_of_basis_s(spec, f, method, rates)
            return seconds
        case Precondition(_, specs):
            seconds = PRECONDITION_CALLS * rates.call_s
            if method == EIGEN_ADAM:
                seconds += ADAM_CALLS * rates.call_s
                return seconds + sum(_adam_seconds(spec, rates) for spec in specs)
            products = 1 if method == "inverse" else 2
            return seconds + products * sum(_product_seconds(spec, rates) for spec in specs)
        case Message():
            return rates.message_s + wire_bytes_of(op) / rates.message_bytes_per_s
    return rates.call_s


def _product_seconds(spec: LayerSpec, rates: Rates, diagonal_passes: int = 3) -> float:
    """Return the seconds of a gradient times both factors.

    The product with a diagonal reads and writes the gradient ``diagonal_passes`` times.
    """
    total = 0.0
    for side in FACTORS:
        other = spec.grad_numel // (spec.groups * spec.dim(side))
        if spec.is_diagonal(side):
            total += rates.pass_s(diagonal_passes * spec.grad_numel)
            continue
        for factor in spec.factors_of(side):
            n = spec.dim(factor)
            total += rates.call_s + rates.product_s(2.0 * spec.groups * n * n * other, n)
        if spec.blocks(side):  # the parts are joined
            total += rates.pass_s(2 * spec.grad_numel)
    return total


def _adam_seconds(spec: LayerSpec, rates: Rates) -> float:
    """Return the seconds in which method eigen_adam makes an update of a gradient."""
    # A side with a diagonal factor is not rotated.
    seconds = rates.pass_s(ADAM_PASSES * spec.grad_numel) + _product_seconds(spec, rates, 0)
    if spec.is_orthogonalized and rates.updates is not None:
        small, large = sorted((spec.g_dim, spec.a_dim))
        seconds += spec.groups * rates.updates.seconds(small, large)
        rates = replace(rates, product_flops=rates.updates.product_flops)
    return seconds + _product_seconds(spec, rates, 0)


def _change_of_basis_s(spec: LayerSpec, factor: Factor, method: str, rates: Rates) -> float:
    """Return the seconds in which method eigen_adam expresses its moments in a new basis."""
    if method != EIGEN_ADAM:
        return 0.0
    n = spec.dim(factor)
    return rates.product_s(2.0 * spec.groups * n**3 + 4.0 * spec.grad_numel * n, n)


@dataclass(frozen=True)
class Seen:
    """The measurements of rank 0 in the first steps."""

    rows: Mapping[str, float]
    """The rows of a and g of one step, by layer. Layers that were not used are missing."""
    step_s: float
    """Seconds of a step of the optimizer alone."""
    statistics_s: float
    """Further seconds of a step whose statistics were collected, with the options as given."""


PlanOf = Callable[[int, int | None], Plan]
"""A function from ``max_dim`` and ``block_size`` to a plan."""


class BudgetError(ValueError):
    """No plan is cheap enough."""


def choose(
    budget: float,
    options: Choice,
    plan_of: PlanOf,
    seen: Seen,
    rates: Rates,
    *,
    may_stretch: bool = True,
) -> Choice:
    """Return the most faithful options whose overhead is at most the budget.

    Options only become coarser: ``max_dim`` and ``block_size`` smaller, intervals longer. What a
    choice loses is the sum of three terms: the share of weights whose factor becomes diagonal (a
    layer counts half for each of its two factors), the share of rows outside of blocks, and a
    twentieth for each doubling of the intervals.

    Args:
        budget: The largest overhead, as a share of a step of the optimizer alone.
        options: What the user set.
        plan_of: Makes the plans to choose from.
        seen: What was measured in the first steps.
        rates: The speed of a rank.
        may_stretch: Whether intervals may become longer.

    Raises:
        BudgetError: The cheapest plan takes more than the budget.
    """
    cheapest = math.inf
    best: tuple[float, Choice] | None = None
    as_given = plan_of(options.max_dim, options.block_size)
    # A call takes time on every device; only imagined rates may be 0.
    modelled = stage_seconds(as_given, seen.rows, rates)[Stage.FACTORS] or 1.0
    blocks = [None] if as_given.method == EIGEN_ADAM else _blocks(options)
    for max_dim, block_size in product(_dims(as_given, options), blocks):
        plan = plan_of(max_dim, block_size)
        seconds = stage_seconds(plan, seen.rows, rates)
        # The kernels of convolutions are faster than the model, so it gives only the ratio.
        factors_s = seen.statistics_s * seconds[Stage.FACTORS] / modelled
        lost = _lost(plan, as_given)
        for stretch in STRETCHES if may_stretch else (1,):
            cost = seconds[Stage.PRECONDITION]
            cost += factors_s / (stretch * options.factor_update_freq)
            cost += seconds[Stage.DECOMPOSE] / (stretch * options.update_freq)
            overhead = cost / seen.step_s
            cheapest = min(cheapest, overhead)
            penalty = lost + math.log2(stretch) / 20
            if overhead <= budget and (best is None or penalty < best[0]):
                intervals = stretch * options.factor_update_freq, stretch * options.update_freq
                best = penalty, Choice(max_dim, block_size, *intervals, overhead)
    if best is None:
        cheapest = math.ceil(100 * cheapest) / 100  # a budget of this size is enough
        raise BudgetError(
            f"max_overhead={budget:g} cannot be met: the cheapest plan takes {cheapest:.2f} of a "
            f"step, which takes {1000 * seen.step_s:.3g} ms without K-FAC. Set max_overhead to at "
            "least this, use a larger batch, or leave layers out with skip"
        )
    return best[1]


def _dims(plan: Plan, options: Choice) -> list[int]:
    """Return the values of max_dim that differ for these layers, the largest first."""
    specs = [placement.layer for placement in plan.placements]
    dims = {spec.dim(side) for spec in specs for side in FACTORS if not spec.is_diagonal(side)}
    largest = max(dims, default=1)
    smaller = sorted({dim - 1 for dim in dims if dim > 1}, reverse=True)
    return [options.max_dim, *(dim for dim in smaller if dim < min(largest, options.max_dim))]


def _blocks(options: Choice) -> list[int | None]:
    """Return the values of block_size, the largest first."""
    most = options.block_size
    return [most, *(rows for rows in BLOCKS if most is None or rows < most)]


def _lost(plan: Plan, as_given: Plan) -> float:
    """Return the share of the curvature that the plan leaves out, weighted by weights."""
    lost = total = 0.0
    for new, old in zip(plan.placements, as_given.placements, strict=True):
        spec = new.layer
        total += 2 * spec.grad_numel
        for side in FACTORS:
            if old.layer.is_diagonal(side):
                continue
            if spec.is_diagonal(side):
                lost += spec.grad_numel
            elif blocks := spec.blocks(side):
                kept = sum(rows**2 for rows in blocks) / spec.dim(side) ** 2
                lost += spec.grad_numel * (1 - kept) / 2
    return lost / total
