"""What a plan costs, without running it: bytes held and sent, FLOPs per kind of op."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from kfac_bench.core.plan import (
    FACTORS,
    ComputeFactor,
    Decompose,
    Message,
    Op,
    Plan,
    Precondition,
    ReduceFactors,
    Stage,
)


def memory_bytes(plan: Plan, rank: int, itemsize: int = 4) -> dict[str, int]:
    """K-FAC state that ``rank`` keeps between steps: running factors and decompositions.

    Every rank keeps all factors (they are all-reduced); decompositions live on the layer's
    gradient workers: eigenvalues and eigenvectors, or the inverse as a full matrix.
    """
    factors = decompositions = 0
    for placement in plan.placements:
        for n in (placement.layer.dim(f) for f in FACTORS):
            factors += n * n
            if rank in placement.grad_workers:
                decompositions += n * n + (n if plan.method == "eigen" else 0)
    return {"factors": factors * itemsize, "decompositions": decompositions * itemsize}


def payload_bytes(plan: Plan, *stages: Stage, itemsize: int = 4) -> dict[str, int]:
    """Bytes the messages of the stages carry, by kind of op; each message counted once."""
    total: Counter[str] = Counter()
    for op in plan.ops(*stages):
        if isinstance(op, Message):
            total[type(op).__name__] += op.numel * itemsize
    return dict(total)


def wire_bytes(plan: Plan, rank: int, *stages: Stage, itemsize: int = 4) -> dict[str, float]:
    """Bytes ``rank`` receives, by kind of op.

    Over p ranks a ring moves 2 (p-1)/p of a reduced payload and (p-1)/p of a broadcast one.
    """
    total: dict[str, float] = defaultdict(float)
    for op in plan.ops(*stages):
        if isinstance(op, Message) and rank in op.ranks:
            passes = 2 if isinstance(op, ReduceFactors) else 1
            share = (len(op.ranks) - 1) / len(op.ranks)
            total[type(op).__name__] += passes * share * op.numel * itemsize
    return dict(total)


def flops(op: Op, method: str, rows: Mapping[str, int]) -> float:
    """Floating-point operations of one compute op; 0 for messages.

    ``rows`` is, per layer, batch times shared positions on one rank. Factors count a full
    product x^T x (2 rows d^2); eigh 14/3 d^3 for vectors and values (LAPACK's divide and
    conquer after the tridiagonal reduction), a Cholesky inverse d^3; eq. 11-13 four products,
    eq. 10 two.
    """
    match op:
        case ComputeFactor(_, layer, factor):
            return 2.0 * rows[layer.name] * layer.dim(factor) ** 2
        case Decompose(_, layer, factor):
            return (14 / 3 if method == "eigen" else 1.0) * layer.dim(factor) ** 3
        case Precondition(_, layer):
            products = 4 if method == "eigen" else 2
            return float(products * layer.a_dim * layer.g_dim * (layer.a_dim + layer.g_dim))
    return 0.0


def stage_flops(plan: Plan, rank: int, rows: Mapping[str, int]) -> dict[Stage, float]:
    """FLOPs of ``rank`` in each stage, each time the stage runs."""
    return {
        stage: sum(flops(op, plan.method, rows) for op in plan.ops(stage) if rank in op.ranks)
        for stage in Stage
    }
