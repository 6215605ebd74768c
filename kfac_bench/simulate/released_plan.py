"""The plan of the code that Pauloski et al. released for their ResNets.

The released code gives layers to ranks in turn (``KFAC.step`` of branch kfac-opt). If there are
more ranks than layers, A and G of a layer go to two ranks, one after the other. Each stage computes
first and sends afterwards.
"""

from collections.abc import Iterable, Sequence

from kfac_bench.core.planning.layer_spec import LayerSpec
from kfac_bench.core.planning.plan import STRATEGY_TABLE, Message, Op, Placement, Plan
from kfac_bench.core.planning.planner import BUCKET_NUMEL, cubic_cost, divide, place_in_turn
from kfac_bench.core.planning.stage_ops import StageOps
from kfac_bench.errors import UsageError

METHOD = "eigen"


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
    ops = StageOps(placements, row, world_size, METHOD, BUCKET_NUMEL, 0, 4)
    slices = ops.slices(divide(placements, METHOD, 1, cubic_cost))
    return Plan(
        world_size,
        strategy,
        METHOD,
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
