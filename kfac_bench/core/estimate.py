"""What a plan costs, without running it: bytes held and sent, FLOPs per kind of op."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from kfac_bench.core.plan import (
    FACTORS,
    ComputeFactor,
    ComputeSecondMoment,
    Decompose,
    LayerSpec,
    Message,
    Op,
    Plan,
    Precondition,
    ReduceFactors,
    ReduceScales,
    ReduceSecondMoments,
    Stage,
)
from kfac_bench.core.planner import factor_numel, has_second_moment

REDUCTIONS = (ReduceScales, ReduceFactors, ReduceSecondMoments)


def memory_bytes(plan: Plan, rank: int) -> dict[str, int]:
    """K-FAC state that ``rank`` keeps between steps: running factors and decompositions.

    Every rank keeps all factors (they are all-reduced); decompositions live on the layer's
    gradient workers: eigenvalues and eigenvectors, or the inverse as a full matrix. EKFAC's second
    moments count as factors.
    """
    factors = decompositions = 0
    for placement in plan.placements:
        spec = placement.layer
        if has_second_moment(spec, plan.method):
            factors += 4 * spec.grad_numel
        for f in FACTORS:
            numel = factor_numel(spec, f)
            if spec.diagonal(f):
                matrix, scale, values = 4 * numel, 0, 0
            else:
                matrix, scale = plan.itemsize * numel, 4 * spec.groups * (plan.itemsize < 4)
                values = 4 * spec.groups * spec.dim(f)
            factors += matrix + scale
            if rank in placement.grad_workers:
                decompositions += matrix + (scale if plan.method == "inverse" else values)
    return {"factors": factors, "decompositions": decompositions}


def payload_bytes(plan: Plan, *stages: Stage) -> dict[str, int]:
    """Bytes the messages of the stages carry, by kind of op; each message counted once."""
    total: Counter[str] = Counter()
    for op in plan.ops(*stages):
        if isinstance(op, Message):
            total[type(op).__name__] += op.numel * op.itemsize
    return dict(total)


def wire_bytes(plan: Plan, rank: int, *stages: Stage) -> dict[str, float]:
    """Bytes ``rank`` receives, by kind of op.

    Over p ranks a ring moves 2 (p-1)/p of a reduced payload and (p-1)/p of a broadcast one.
    """
    total: dict[str, float] = defaultdict(float)
    for op in plan.ops(*stages):
        if isinstance(op, Message) and rank in op.ranks:
            passes = 2 if isinstance(op, REDUCTIONS) else 1
            share = (len(op.ranks) - 1) / len(op.ranks)
            total[type(op).__name__] += passes * share * op.numel * op.itemsize
    return dict(total)


def flops(op: Op, method: str, rows: Mapping[str, int]) -> float:
    """Floating-point operations of one compute op; 0 for messages.

    ``rows`` is, per layer, batch times shared positions on one rank. Factors count a full
    product x^T x (2 rows d^2); eigh 14/3 d^3 for vectors and values (LAPACK's divide and
    conquer after the tridiagonal reduction), a Cholesky inverse d^3; eq. 11-13 four products,
    eq. 10 two; a diagonal counts as nothing, the sum of its squares apart. EKFAC rotates rows
    and multiplies them, as a weight gradient does.
    """
    match op:
        case ComputeFactor(_, layer, factor):
            n = layer.dim(factor)
            return 2.0 * rows[layer.name] * layer.groups * n * (1 if layer.diagonal(factor) else n)
        case ComputeSecondMoment(_, layer):
            a, g = layer.a_dim, layer.g_dim
            return 2.0 * rows[layer.name] * layer.groups * (a * a + g * g + a * g)
        case Decompose(_, members):
            cubes = sum(s.groups * s.dim(f) ** 3 for s, f in members if not s.diagonal(f))
            return (1.0 if method == "inverse" else 14 / 3) * cubes
        case Precondition(_, layers):
            return (1 if method == "inverse" else 2) * sum(map(_two_sided_product, layers))
    return 0.0


def _two_sided_product(spec: LayerSpec) -> float:
    """FLOPs of [g, g] @ [g, a] @ [a, a] in each group."""
    inner = (0 if spec.g_diagonal else spec.g_dim) + (0 if spec.a_diagonal else spec.a_dim)
    return 2.0 * spec.grad_numel * inner


def stage_flops(plan: Plan, rank: int, rows: Mapping[str, int]) -> dict[Stage, float]:
    """FLOPs of ``rank`` in each stage, each time the stage runs."""
    return {
        stage: sum(flops(op, plan.method, rows) for op in plan.ops(stage) if rank in op.ranks)
        for stage in Stage
    }
