"""What a plan costs, without running it: bytes held and sent, FLOPs per kind of op."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kfac_bench.core.planning.layer_spec import FACTORS, LayerSpec
from kfac_bench.core.planning.ops import (
    ComputeFactor,
    ComputeSecondMoment,
    Decompose,
    Message,
    Op,
    Precondition,
    ReduceScales,
)
from kfac_bench.core.planning.plan import IDENTITY, Plan, Stage
from kfac_bench.core.planning.sizes import factor_numel, kept_bytes


def memory_bytes(plan: Plan, rank: int) -> dict[str, int]:
    """K-FAC state that ``rank`` keeps between steps: running factors and decompositions.

    Decompositions live on the layer's gradient workers: eigenvalues and eigenvectors, or the
    inverse as a full matrix. EKFAC's second moments count as factors.
    """
    total = {"factors": 0, "decompositions": 0}
    for kind, ranks, size in _kept(plan):
        if rank in ranks:
            total[kind] += size
    return total


def _kept(plan: Plan) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """What is kept between steps: its kind, on which ranks, bytes on each of them."""
    holders = {}
    for op in plan.ops(Stage.FACTORS):
        if isinstance(op, ComputeFactor):
            holders[op.layer, op.factor] = op.ranks
        elif (root := getattr(op, "root", None)) is not None:  # reduced to it alone
            holders.update(dict.fromkeys(getattr(op, "members", ()), (root,)))
        elif isinstance(op, ComputeSecondMoment):
            yield "factors", op.ranks, 4 * op.layer.grad_numel
    for placement in plan.placements if plan.factors else ():
        spec = placement.layer
        for f in FACTORS:
            factor, decomposition = kept_bytes(spec, f, plan.method, plan.itemsize)
            yield "factors", holders[spec, f], factor
            yield "decompositions", placement.grad_workers, decomposition


def payload_bytes(plan: Plan, *stages: Stage) -> dict[str, int]:
    """Bytes the messages of the stages carry, by kind of op; each message counted once."""
    total: Counter[str] = Counter()
    for op in plan.ops(*stages):
        if isinstance(op, Message):
            total[type(op).__name__] += op.numel * op.itemsize
    return dict(total)


def wire_bytes(plan: Plan, rank: int, *stages: Stage) -> dict[str, float]:
    """Bytes ``rank`` receives, by kind of op; see :func:`wire_bytes_of`."""
    total: dict[str, float] = defaultdict(float)
    for op in plan.ops(*stages):
        if isinstance(op, Message) and rank in op.ranks:
            total[type(op).__name__] += wire_bytes_of(op)
    return dict(total)


def wire_bytes_of(op: Message) -> float:
    """Bytes that each rank of a message receives.

    Over p ranks a ring moves 2 (p-1)/p of a payload that all of them reduce, and (p-1)/p of one
    that goes from a root or to it.
    """
    passes = 2 if getattr(op, "root", None) is None else 1
    return passes * (len(op.ranks) - 1) / len(op.ranks) * op.numel * op.itemsize


def flops(
    op: Op,
    method: str,
    rows: Mapping[str, int],
    *,
    reduced: Mapping[str, int] | None = None,
    seeds: int = 1,
) -> float:
    """Floating-point operations of one compute op; 0 for messages.

    ``rows`` is, per layer, batch times shared positions on one rank; ``reduced`` what factors
    are made of instead where positions are reduced first. Each of ``seeds`` gradients that are
    sent back for the Fisher has a G and a second moment. Factors count a full product x^T x
    (2 rows d^2); eigh 14/3 d^3 for vectors and values (LAPACK's divide and conquer after the
    tridiagonal reduction), a Cholesky inverse d^3; eq. 11-13 four products, eq. 10 two; a diagonal
    counts as nothing, the sum of its squares apart. EKFAC rotates rows and multiplies them, as a
    weight gradient does.
    """
    match op:
        case ComputeFactor(_, layer, factor):
            n, each = layer.dim(factor), (rows if reduced is None else reduced)[layer.name]
            times = seeds if factor == "G" else 1
            return 2.0 * times * each * layer.groups * n * (1 if layer.diagonal(factor) else n)
        case ComputeSecondMoment(_, layer):
            a, g = layer.a_dim, layer.g_dim
            return 2.0 * seeds * rows[layer.name] * layer.groups * (a * a + g * g + a * g)
        case Decompose(_, members):
            cubes = sum(s.groups * s.dim(f) ** 3 for s, f in members if not s.diagonal(f))
            return (1.0 if method == "inverse" else 14 / 3) * cubes
        case Precondition(_, layers):
            products = {"inverse": 1, IDENTITY: 0}.get(method, 2)
            return products * sum(map(_two_sided_product, layers))
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


@dataclass(slots=True)
class Traffic:
    """Messages that a rank takes part in, and the bytes they carry and it receives."""

    messages: int = 0
    payload_bytes: int = 0
    wire_bytes: float = 0.0

    def add(self, op: Message) -> None:
        """Count one."""
        self.messages += 1
        self.payload_bytes += op.numel * op.itemsize
        self.wire_bytes += wire_bytes_of(op)


@dataclass(slots=True)
class RankCost:
    """What one rank holds; and does and sends each time a stage runs, all slices together."""

    memory_bytes: dict[str, int] = field(
        default_factory=lambda: {"factors": 0, "decompositions": 0}
    )
    """As :func:`memory_bytes`."""
    statistics_bytes: int = 0
    """Of a batch, in fp32, held while the factors stage runs."""
    bucket_bytes: dict[Stage, int] = field(default_factory=lambda: dict.fromkeys(Stage, 0))
    """What messages hold in the stage, or its largest slice, at their peak, beside the state."""
    flops: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(Stage, 0.0))
    traffic: dict[Stage, dict[str, Traffic]] = field(
        default_factory=lambda: {stage: {} for stage in Stage}
    )
    """By kind of message."""

    @property
    def peak_bytes(self) -> int:
        """State, and what the stage that needs most holds beside it."""
        buckets = self.bucket_bytes
        more = self.statistics_bytes + buckets[Stage.FACTORS], *buckets.values()
        return sum(self.memory_bytes.values()) + max(more)


def rank_costs(plan: Plan, flops_of: Callable[[Op], float]) -> list[RankCost]:
    """Of each rank; ``flops_of`` a compute op is what one of its ranks does."""
    costs = [RankCost() for _ in range(plan.world_size)]
    for kind, ranks, size in _kept(plan):
        for rank in ranks:
            costs[rank].memory_bytes[kind] += size
    for stage in Stage:
        for part in plan.slices if stage is Stage.DECOMPOSE else [tuple(plan.ops(stage))]:
            for op in part:
                work, statistic = flops_of(op), _statistic_bytes(op)
                for rank in op.ranks:
                    costs[rank].flops[stage] += work
                    costs[rank].statistics_bytes += statistic
                    if isinstance(op, Message):
                        kinds = costs[rank].traffic[stage]
                        kinds.setdefault(type(op).__name__, Traffic()).add(op)
            for rank, size in _bucket_bytes(part).items():
                peak = costs[rank].bucket_bytes
                peak[stage] = max(peak[stage], size)
    return costs


def _statistic_bytes(op: Op) -> int:
    if isinstance(op, ComputeFactor):
        return 4 * factor_numel(op.layer, op.factor)
    return 4 * op.layer.grad_numel if isinstance(op, ComputeSecondMoment) else 0


def _bucket_bytes(ops: Sequence[Op]) -> dict[int, int]:
    """Of each rank: all messages of one run are under way before the first is unpacked."""
    under_way: Counter[int] = Counter()
    peak: Counter[int] = Counter()
    for op in ops:
        if isinstance(op, Message):
            for rank in op.ranks:
                under_way[rank] += op.numel * op.itemsize
                peak[rank] = max(peak[rank], under_way[rank])
                if isinstance(op, ReduceScales):  # waited for at once, with all before it
                    under_way[rank] = 0
    return dict(peak)
