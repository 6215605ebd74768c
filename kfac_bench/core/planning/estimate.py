"""The cost of a plan, without running it: elements and bytes kept and sent, FLOPs of each op.

``kfac-plan``, the report of a preconditioner and the simulator call these functions. The planner
and the messages use the sizes of single factors.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kfac_bench.core.planning.layer_spec import Factor, LayerSpec, side_of
from kfac_bench.core.planning.plan import (
    EIGEN_ADAM,
    IDENTITY,
    ComputeFactor,
    ComputeSecondMoment,
    Decompose,
    Message,
    Op,
    Plan,
    Precondition,
    ReduceScales,
    Stage,
)


def factor_numel(spec: LayerSpec, factor: Factor) -> int:
    """Return the elements of a factor as ranks keep it."""
    return math.prod(spec.factor_shape(factor))


def packed_numel(spec: LayerSpec, factor: Factor) -> int:
    """Return the elements of a factor in a message: one triangle of each block, or its diagonal."""
    n = spec.dim(factor)
    return spec.groups * (n if spec.is_diagonal(factor) else n * (n + 1) // 2)


def decomposition_parts(
    spec: LayerSpec, factor: Factor, method: str, itemsize: int = 4
) -> tuple[int, int]:
    """Return the elements that a message has for the numbers, and for the matrix, of one member.

    Numbers are eigenvalues, diagonals and, in half precision, the scale of an inverse. Each of
    them is fp32, and so two elements of a message in half precision. The matrix is that of the
    eigenvectors, or one triangle of an inverse.
    """
    n, groups, elements_each = spec.dim(factor), spec.groups, 4 // itemsize
    if spec.is_diagonal(factor):
        return groups * n * elements_each, 0
    if method == "inverse":
        return groups * elements_each if itemsize < 4 else 0, packed_numel(spec, factor)
    return groups * n * elements_each, groups * n * n


def decomposition_numel(spec: LayerSpec, factor: Factor, method: str, itemsize: int = 4) -> int:
    """Return the elements that a message has for one decomposition."""
    return sum(decomposition_parts(spec, factor, method, itemsize))


def kept_bytes(spec: LayerSpec, factor: Factor, method: str, itemsize: int) -> tuple[int, int]:
    """Return the bytes of a running factor, and of its decomposition, as ranks keep them.

    Eigenvalues, diagonals, and in half precision the scale of each matrix, are fp32.
    """
    numel = factor_numel(spec, factor)
    if spec.is_diagonal(factor):
        return 4 * numel, 4 * numel
    matrix, scale = itemsize * numel, 4 * spec.groups * (itemsize < 4)
    values = 4 * spec.groups * spec.dim(factor)
    return matrix + scale, matrix + (scale if method == "inverse" else values)


def moments_bytes(spec: LayerSpec, method: str) -> int:
    """Return the bytes of Adam's two moments on each gradient worker; only eigen_adam has them."""
    return 2 * 4 * spec.grad_numel if method == EIGEN_ADAM else 0


def has_second_moment(spec: LayerSpec, method: str) -> bool:
    """Return whether EKFAC has second moments of the layer: where neither factor is a diagonal."""
    return method == "ekfac" and not (spec.a_diagonal or spec.g_diagonal)


def memory_bytes(plan: Plan, rank: int) -> dict[str, int]:
    """Return the bytes of K-FAC state that ``rank`` keeps between steps, by kind.

    ``decompositions`` are kept by the gradient workers of a layer: eigenvalues and eigenvectors,
    or full inverses. ``factors`` are running factors and EKFAC's second moments. With eigen_adam
    the gradient workers also keep ``moments``, those of Adam.
    """
    total = _no_bytes(plan)
    for kind, ranks, size in _kept(plan):
        if rank in ranks:
            total[kind] += size
    return total


def _no_bytes(plan: Plan) -> dict[str, int]:
    """Return 0 for each kind of state that ranks keep."""
    kinds = ["factors", "decompositions", *(["moments"] if plan.method == EIGEN_ADAM else [])]
    return dict.fromkeys(kinds, 0)


def _kept(plan: Plan) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield the kind of each tensor kept between steps, its ranks, and its bytes on each rank."""
    holders = {}
    for op in plan.ops(Stage.FACTORS):
        if isinstance(op, ComputeFactor):
            holders[op.layer, op.factor] = op.ranks
        elif (root := getattr(op, "root", None)) is not None:  # only the root keeps them
            holders.update(dict.fromkeys(getattr(op, "members", ()), (root,)))
        elif isinstance(op, ComputeSecondMoment):
            yield "factors", op.ranks, 4 * op.layer.grad_numel
    # Without statistics (method identity) nothing is decomposed or kept.
    for placement in plan.placements if plan.factors else ():
        spec = placement.layer
        for f in spec.factors:
            factor, decomposition = kept_bytes(spec, f, plan.method, plan.itemsize)
            yield "factors", holders[spec, f], factor
            yield "decompositions", placement.grad_workers, decomposition
        if moments := moments_bytes(spec, plan.method):
            yield "moments", placement.grad_workers, moments


def payload_bytes(plan: Plan, *stages: Stage) -> dict[str, int]:
    """Return the bytes that messages of the stages carry, by kind of op.

    Each message counts once, however many ranks it has.
    """
    total: Counter[str] = Counter()
    for op in plan.ops(*stages):
        if isinstance(op, Message):
            total[type(op).__name__] += op.numel * op.itemsize
    return dict(total)


def wire_bytes_of(op: Message) -> float:
    """Return the bytes that a rank of a message receives, the mean over its ranks in a ring.

    A ring of p ranks moves 2 (p-1)/p of the payload of an all-reduce, and (p-1)/p of the payload
    of a broadcast or a reduce, which have a root.
    """
    passes = 2 if getattr(op, "root", None) is None else 1
    return passes * (len(op.ranks) - 1) / len(op.ranks) * op.numel * op.itemsize


def flops(
    op: Op,
    method: str,
    rows: Mapping[str, float],
    *,
    reduced: Mapping[str, float] | None = None,
    seeds: int = 1,
) -> float:
    """Return the floating-point operations of one compute op, 0 for a message.

    What counts:

    * A factor is a full product x^T x: 2 rows d^2. A diagonal is a sum of squares.
    * eigh takes 14/3 d^3 for values and vectors (LAPACK's divide and conquer after the reduction
      to a tridiagonal matrix), an inverse by Cholesky d^3. A diagonal takes nothing. A QR step of
      eigen_adam takes as many as eigh: 2 d^3 for a product and 8/3 d^3 for QR and its Q.
    * Preconditioning takes four products (eq. 11-13), or two with inverses (eq. 10).
    * An orthogonalized update takes 2 s^2 l for X X^T and 8 s^3 per Newton-Schulz step, less 4 s^3
      in all; s is the smaller side of the gradient, l the larger one. Large updates in bfloat16
      take 4 s^2 l + 2 s^3 per step instead, at a higher rate; here they count as the others.
    * A second moment of EKFAC rotates the rows and multiplies them, as a weight gradient does.

    Args:
        op: The op.
        method: The plan's method.
        rows: By layer, the batch of one rank times the positions that share the weight.
        reduced: As ``rows``, for factors whose positions are reduced first; None if none are.
        seeds: Gradients that are sent back for the Fisher. Each has a G and a second moment.
    """
    match op:
        case ComputeFactor(_, layer, factor):
            n, each = layer.dim(factor), (rows if reduced is None else reduced)[layer.name]
            times = seeds if side_of(factor) == "G" else 1
            return 2.0 * times * each * layer.groups * n * (1 if layer.is_diagonal(factor) else n)
        case ComputeSecondMoment(_, layer):
            squares = _squares(layer, "A") + _squares(layer, "G")
            products = squares + layer.a_dim * layer.g_dim
            return 2.0 * seeds * rows[layer.name] * layer.groups * products
        case Decompose(_, members):
            cubes = sum(s.groups * s.dim(f) ** 3 for s, f in members if not s.is_diagonal(f))
            return (1.0 if method == "inverse" else 14 / 3) * cubes
        case Precondition(_, layers):
            products = {"inverse": 1, IDENTITY: 0}.get(method, 2)
            return sum(products * _two_sided_product(s) + _newton_schulz(s) for s in layers)
    return 0.0


def _two_sided_product(spec: LayerSpec) -> float:
    """Return the FLOPs of [g, g] @ [g, a] @ [a, a] in each group."""
    of_a, of_g = spec.g_dim * _squares(spec, "A"), spec.a_dim * _squares(spec, "G")
    return 2.0 * spec.groups * (of_a + of_g)


def _squares(spec: LayerSpec, side: Factor) -> int:
    """Return the elements of A or G in one group, 0 for a diagonal."""
    if spec.is_diagonal(side):
        return 0
    return sum(spec.dim(f) ** 2 for f in spec.factors_of(side))


def _newton_schulz(spec: LayerSpec) -> float:
    """Return the FLOPs of :func:`.linalg.orthogonalizer`, with X X^T and a product with a basis."""
    if not spec.is_orthogonalized:
        return 0.0
    small, large = sorted((spec.g_dim, spec.a_dim))
    cubes = 8 * spec.orthogonal_steps - 4  # the first step needs no product of polynomials
    return spec.groups * (2.0 * small**2 * large + cubes * small**3)


@dataclass(slots=True)
class Traffic:
    """The messages that a rank takes part in: their payload, and the bytes that it receives."""

    messages: int = 0
    payload_bytes: int = 0
    wire_bytes: float = 0.0

    def add(self, op: Message) -> None:
        """Count one message."""
        self.messages += 1
        self.payload_bytes += op.numel * op.itemsize
        self.wire_bytes += wire_bytes_of(op)


@dataclass(slots=True)
class RankCost:
    """The memory of one rank, and its work and messages each time that a stage runs."""

    memory_bytes: dict[str, int]
    """Bytes of K-FAC state by kind, from :func:`memory_bytes`, and of the thread's ``jobs``."""
    statistics_bytes: int = 0
    """Bytes of batch statistics in fp32, held while the factors stage runs."""
    bucket_bytes: dict[Stage, int] = field(default_factory=lambda: dict.fromkeys(Stage, 0))
    """Largest number of bytes in buckets at one time, by stage; slices run one at a time."""
    flops: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(Stage, 0.0))
    traffic: dict[Stage, dict[str, Traffic]] = field(
        default_factory=lambda: {stage: {} for stage in Stage}
    )
    """Messages and their bytes, by stage and kind of message."""

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes at one time: the state, and what the largest stage adds."""
        buckets = self.bucket_bytes
        # Batch statistics are there in the factors stage alone.
        more = self.statistics_bytes + buckets[Stage.FACTORS], *buckets.values()
        return sum(self.memory_bytes.values()) + max(more)


def rank_costs(
    plan: Plan, flops_of: Callable[[Op], float], *, background: bool = False
) -> list[RankCost]:
    """Return the cost of each rank.

    Args:
        plan: The plan.
        flops_of: Returns the FLOPs of one of an op's ranks.
        background: Whether a thread decomposes copies of the factors, one slice at a time. Until
            the results are in use, the rank also keeps the old decompositions.
    """
    jobs = {"jobs": 0} if background else {}
    costs = [RankCost(_no_bytes(plan) | jobs) for _ in range(plan.world_size)]
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
            for rank, size in _job_bytes(plan, part).items() if background else ():
                kept = costs[rank].memory_bytes
                kept["jobs"] = max(kept["jobs"], size)
    return costs


def _job_bytes(plan: Plan, ops: Sequence[Op]) -> dict[int, int]:
    """Return the bytes of the factors that ranks decompose, and of their decompositions."""
    total: Counter[int] = Counter()
    for op in ops:
        if isinstance(op, Decompose):
            sizes = (kept_bytes(spec, f, plan.method, plan.itemsize) for spec, f in op.members)
            total += Counter(dict.fromkeys(op.ranks, sum(map(sum, sizes))))
    return total


def _statistic_bytes(op: Op) -> int:
    if isinstance(op, ComputeFactor):
        return 4 * factor_numel(op.layer, op.factor)
    return 4 * op.layer.grad_numel if isinstance(op, ComputeSecondMoment) else 0


def _bucket_bytes(ops: Sequence[Op]) -> dict[int, int]:
    """Return the largest bytes in buckets at one time, by rank.

    All messages of a stage, or slice, are in flight before the first is unpacked.
    """
    in_flight: Counter[int] = Counter()
    peak: Counter[int] = Counter()
    for op in ops:
        if isinstance(op, Message):
            for rank in op.ranks:
                in_flight[rank] += op.numel * op.itemsize
                peak[rank] = max(peak[rank], in_flight[rank])
                if isinstance(op, ReduceScales):  # the ranks wait for it and all before it
                    in_flight[rank] = 0
    return dict(peak)
