"""From layer shapes, world size and strategy to a :class:`Plan`: a pure function, no torch."""

from collections.abc import Sequence

from kfac_bench.core.planning import slices
from kfac_bench.core.planning.cost import Cost, cubic_cost
from kfac_bench.core.planning.layer_spec import LayerSpec
from kfac_bench.core.planning.placement import (
    columns,
    gradient_workers,
    place,
    place_in_turn,
    weigh,
)
from kfac_bench.core.planning.plan import (
    BALANCES,
    METHODS,
    STRATEGIES,
    STRATEGY_TABLE,
    Plan,
)
from kfac_bench.core.planning.stage_ops import StageOps

BUCKET_NUMEL = 1 << 22
"""Elements that a message collects before it is sent (16 MiB of fp32).

Far beyond the size at which latency matters, and small enough that the first message leaves while
later members are still computed.
"""

BATCH_NUMEL = 1 << 22
"""Most elements of equally shaped layers that a GPU preconditions, or decomposes, at once.

A CPU gains nothing from batches (docs/explanation/what_was_tried.md).
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
        slices=ops.slices(slices.divide(placements, method, spread, cost)),
        precondition=tuple(precondition),
        itemsize=itemsize,
        sharded=sharded,
    )
