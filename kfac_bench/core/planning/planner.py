"""The planner: a pure function of layer shapes, world size and strategy. It needs no torch.

:func:`make_plan` places layers on the grid of ranks so that the load is balanced, divides their
decompositions into slices, and lets :class:`.StageOps` list the ops.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache

from kfac_bench.core.planning.estimate import kept_bytes, moments_bytes
from kfac_bench.core.planning.layer_spec import Factor, LayerSpec
from kfac_bench.core.planning.plan import (
    BALANCES,
    METHODS,
    STRATEGIES,
    STRATEGY_TABLE,
    Placement,
    Plan,
    Strategy,
)
from kfac_bench.core.planning.stage_ops import StageOps, Unit

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


FactorWeight = Callable[[LayerSpec, Factor], float]


def gradient_workers(row: Strategy, fraction: float | None, world_size: int) -> int:
    """Return the number of ranks that precondition a layer: the fraction must give a divisor."""
    given = fraction if row.adjustable else None
    if given is not None and not 0 < given <= 1:
        raise ValueError(f"grad_worker_fraction={given:g}: choose a fraction above 0 and at most 1")
    fraction = row.fraction if given is None else given
    workers = max(1, round(world_size * fraction))
    if world_size % workers and given is None:  # the half of an odd number
        raise ValueError(
            f"strategy=hybrid_opt needs an even number of ranks, not {world_size}: by default half "
            f"of them precondition a layer. Or set grad_worker_fraction=k/{world_size} with k a "
            "divisor"
        )
    if world_size % workers:
        raise ValueError(
            f"grad_worker_fraction={fraction:g} of {world_size} ranks is {workers} gradient "
            f"workers, which do not divide the ranks: choose k/{world_size} with k a divisor"
        )
    return workers


def columns(world_size: int, workers: int) -> list[tuple[int, ...]]:
    """Return the columns of the grid: the ranks that are gradient workers of the same layers."""
    width = world_size // workers
    return [tuple(range(c, world_size, width)) for c in range(width)]


def work_of(spec: LayerSpec, factor: Factor, cost: Cost) -> float:
    """Return the cost of decomposing a factor, 0 for a diagonal."""
    return 0.0 if spec.is_diagonal(factor) else spec.groups * cost(spec.dim(factor))


def weigh(
    balance: str, owned: bool, workers: int, cost: Cost, method: str, itemsize: int
) -> tuple[Callable[[LayerSpec], float], FactorWeight]:
    """Return the weight of a layer for its column, and that of a factor for a worker in it.

    Args:
        balance: What to balance, ``compute`` or ``memory``.
        owned: Whether only the rank that decomposes a factor keeps it. Otherwise all ranks keep
            all factors, and there is no memory to balance among the workers of a column.
        workers: Gradient workers of a layer.
        cost: The cost of decomposing an [n, n] matrix.
        method: How factors are decomposed.
        itemsize: Bytes per element of dense factors and decompositions.
    """

    def work(spec: LayerSpec, factor: Factor) -> float:
        return work_of(spec, factor, cost)

    def kept(spec: LayerSpec, factor: Factor) -> float:
        return kept_bytes(spec, factor, method, itemsize)[0]

    def kept_by_column(spec: LayerSpec) -> float:
        each = [kept_bytes(spec, f, method, itemsize) for f in spec.factors]
        # Each gradient worker keeps the decompositions and Adam's moments, one of them the factor:
        # so on average a worker keeps 1 / workers of it.
        moments = moments_bytes(spec, method)
        return moments + sum(d + (f / workers if owned else 0) for f, d in each)

    if balance == "compute":
        return lambda spec: sum(work(spec, f) for f in spec.factors), work
    return kept_by_column, kept if owned else work


def place(
    layers: Sequence[LayerSpec],
    columns: Sequence[tuple[int, ...]],
    is_colocated: Callable[[LayerSpec], bool],
    on_column: Callable[[LayerSpec], float],
    on_worker: FactorWeight,
) -> tuple[Placement, ...]:
    """Give each layer a column of the grid, and each factor a worker in it, the heaviest first.

    Each goes to the column or rank with the smallest load so far (longest processing time first).
    If a layer ``is_colocated``, one worker decomposes all its factors.
    """
    column_load = [0.0] * len(columns)
    load = dict.fromkeys((r for column in columns for r in column), 0.0)
    placed: dict[str, Placement] = {}
    # The name breaks ties: every rank must find the same order.
    for spec in sorted(layers, key=lambda s: (-on_column(s), s.name)):
        c = column_load.index(min(column_load))
        column_load[c] += on_column(spec)
        weight = {f: on_worker(spec, f) for f in spec.factors}
        heavy_first = sorted(spec.factors, key=lambda f: -weight[f])
        worker: dict[Factor, int] = {}
        for factors in [spec.factors] if is_colocated(spec) else [(f,) for f in heavy_first]:
            rank = min(columns[c], key=lambda r: (load[r], r))
            load[rank] += sum(weight[f] for f in factors)
            worker |= dict.fromkeys(factors, rank)
        placed[spec.name] = Placement(spec, tuple(worker[f] for f in spec.factors), columns[c])
    return tuple(placed[s.name] for s in layers)


def place_in_turn(layers: Sequence[LayerSpec], world_size: int) -> tuple[Placement, ...]:
    """Give layers to ranks in turn, whatever the layers weigh."""
    turns = [i % world_size for i in range(len(layers))]
    return tuple(
        Placement(s, (r,) * len(s.factors), (r,)) for s, r in zip(layers, turns, strict=True)
    )


def divide(
    placements: Sequence[Placement], method: str, spread: int, cost: Cost
) -> list[list[Unit]]:
    """Return at most ``spread`` slices of about equal work.

    There are at most (total work) / (largest unit) slices: with more of them, the longest step
    would not become shorter. The world size and the ranks play no part, so the same factors are
    decomposed at the same step on any number of ranks.
    """
    # EKFAC measures second moments in the eigenbasis of A and G: both must change at one step.
    units: list[Unit] = [
        (p, factors)
        for p in reversed(placements)
        for factors in ([p.layer.factors] if method == "ekfac" else [(f,) for f in p.layer.factors])
    ]
    work = [sum(work_of(p.layer, f, cost) for f in factors) for p, factors in units]
    positive = [w for w in work if w > 0]
    count = min(spread, len(positive), math.ceil(sum(positive) / max(positive))) if positive else 1
    load = [0.0] * count
    slice_of = {}
    # The heaviest unit goes first, each to the lightest slice so far.
    for i in sorted(range(len(units)), key=lambda i: (-work[i], i)):
        slice_of[i] = load.index(min(load))
        load[slice_of[i]] += work[i]
    return [[u for i, u in enumerate(units) if slice_of[i] == k] for k in range(count)]


BUCKET_NUMEL = 1 << 22
"""Elements that a message collects before it is sent (16 MiB of fp32).

Far beyond the size at which latency matters, and small enough that the first message leaves while
later members are still computed.
"""

BATCH_NUMEL = 1 << 22
"""Most elements of equally shaped layers that a GPU preconditions, or decomposes, at once.

A CPU gains nothing from batches (docs/lab/what_was_tried.md).
"""


def make_plan(
    layers: Sequence[LayerSpec],
    world_size: int = 1,
    *,
    strategy: str = "comm_opt",
    grad_worker_fraction: float | None = None,
    colocate_factors: bool | None = None,
    balance: str = "compute",
    method: str = "eigen",
    spread: int = 1,
    cost: Cost = cubic_cost,
    bucket_numel: int = BUCKET_NUMEL,
    batch_numel: int = 0,
    itemsize: int = 4,
    sharded: bool = False,
) -> Plan:
    """Place layers on ranks and derive every op. Ties go to the lower rank, so all ranks agree.

    Args:
        layers: the layers, in the order of the model.
        world_size: number of ranks.
        strategy: a row of :data:`STRATEGY_TABLE`.
        grad_worker_fraction: share of the ranks that precondition a layer. The strategy's own
            value holds where this is None, and where the strategy does not let it change.
        colocate_factors: whether one rank decomposes both factors of a layer. None leaves the
            choice to the strategy, but the blocks of a divided factor go to several ranks.
        balance: what ranks share evenly: ``compute``, the ``cost`` of decompositions, or
            ``memory``, the bytes that they keep.
        method: how factors are decomposed, one of :data:`METHODS`.
        spread: largest number of slices that the decompositions are divided into.
        cost: cost of decomposing an [n, n] matrix.
        bucket_numel: elements that a message collects before it is sent.
        batch_numel: elements that one batch of equal shapes has at most.
        itemsize: bytes per element of dense factors and decompositions.
        sharded: whether each rank holds only parts of the gradients.

    Raises:
        ValueError: for an unknown name, for a fraction whose gradient workers do not divide the
            ranks, and for EKFAC where a rank lacks eigenvectors.
    """
    for name, value, choices in (
        ("strategy", strategy, STRATEGIES),
        ("method", method, METHODS),
        ("balance", balance, BALANCES),
    ):
        if value not in choices:
            raise ValueError(f"{name}={value!r}: choose one of {', '.join(choices)}")
    row = STRATEGY_TABLE[strategy]
    workers = gradient_workers(row, grad_worker_fraction, world_size)
    if method == "ekfac" and world_size > 1 and (workers < world_size or row.factors == "local"):
        raise ValueError(
            "method=ekfac needs, on all ranks, the eigenvectors of statistics of all ranks; "
            f"strategy={strategy} does not provide them: choose comm_opt"
        )
    if row.in_turn:
        placements = place_in_turn(layers, world_size)
    else:
        weights = weigh(balance, row.factors != "all", workers, cost, method, itemsize)

        def is_colocated(spec: LayerSpec) -> bool:
            # A factor is divided so that ranks share its work. But the damping of an inverse
            # depends on all blocks, and an owner has no blocks of other owners.
            needs_blocks = method == "inverse" and row.factors != "all"
            default = row.colocate and (needs_blocks or not spec.is_divided)
            return default if colocate_factors is None else colocate_factors

        placements = place(layers, columns(world_size, workers), is_colocated, *weights)
    ops = StageOps(placements, row, world_size, method, bucket_numel, batch_numel, itemsize)
    # Sharded gradients become whole before they are preconditioned, and the clip needs products.
    precondition = list(ops.precondition())
    if sharded and world_size > 1:
        precondition = [*ops.gather_gradients(), *precondition, ops.reduce_products()]
    return Plan(
        world_size,
        strategy,
        method,
        placements,
        factors=(*ops.factors(), *ops.second_moments()),
        slices=ops.slices(divide(placements, method, spread, cost)),
        precondition=tuple(precondition),
        itemsize=itemsize,
        sharded=sharded,
    )
