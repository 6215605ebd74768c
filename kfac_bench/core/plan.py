"""Which rank does what in one K-FAC step: an immutable table, computed once.

A :class:`Plan` is a pure function of layer shapes, world size and strategy. It holds no tensor,
no process group and no "my rank", so every rank builds the same one; the step executes it, the
memory and communication report sums it, a simulator can time it.

The grid of gradient workers (KAISA), here for 8 ranks and 2 gradient workers per layer::

        col 0  col 1  col 2  col 3      a layer lives in one column: its gradient workers,
        -----  -----  -----  -----      who hold its decompositions and precondition it
    row 0  0      1      2      3
    row 1  4      5      6      7       a row shares preconditioned gradients

One gradient worker per layer is ``layer_wise`` (Osawa et al. 2019; K-FAC-lw in the paper) or
``mem_opt`` (KAISA: the same, balanced by work); all ranks is ``comm_opt`` (K-FAC-opt, the
paper's own, section 4.2); between them is ``hybrid_opt``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Literal, TypeVar

T = TypeVar("T")

Factor = Literal["A", "G"]
FACTORS: tuple[Factor, ...] = ("A", "G")

METHODS = ("eigen", "inverse")
STRATEGIES = ("comm_opt", "layer_wise", "mem_opt", "hybrid_opt")

BUCKET_NUMEL = 1 << 22
"""Elements a message collects before it is sent (16 MiB of fp32): far beyond where latency
matters, small enough that the first message leaves while later ones are still computed."""


class Stage(Enum):
    """The three parts of a K-FAC step; each runs at its own frequency."""

    FACTORS = "factors"
    DECOMPOSE = "decompose"
    PRECONDITION = "precondition"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shapes of one layer seen as y = W a: A is [a_dim, a_dim], G is [g_dim, g_dim]."""

    name: str
    a_dim: int  # inputs of the linear map, plus one if it has a bias
    g_dim: int  # outputs

    def dim(self, factor: Factor) -> int:
        """Side of the A or the G matrix."""
        return self.a_dim if factor == "A" else self.g_dim


@dataclass(frozen=True, slots=True)
class Op:
    """One row of the table: ``ranks`` take part."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ComputeFactor(Op):
    """The fresh batch statistic of one factor."""

    layer: LayerSpec
    factor: Factor


@dataclass(frozen=True, slots=True)
class Decompose(Op):
    """Eigendecompose or invert one running factor."""

    layer: LayerSpec
    factor: Factor


@dataclass(frozen=True, slots=True)
class Precondition(Op):
    """Multiply one layer's gradient by the damped inverse curvature."""

    layer: LayerSpec


@dataclass(frozen=True, slots=True)
class Message(Op):
    """An op that sends a bucket of ``numel`` elements; ``index`` counts within its kind."""

    index: int
    numel: int

    @property
    def name(self) -> str:
        """The same on all ranks and in every step (Horovod needs it, traces show it)."""
        return f"{type(self).__name__}/{self.index}"


@dataclass(frozen=True, slots=True)
class ReduceFactors(Message):
    """Sum fresh statistics over ranks: of each a packed triangle and its weight."""

    members: tuple[tuple[LayerSpec, Factor], ...]


@dataclass(frozen=True, slots=True)
class ShareDecompositions(Message):
    """Send decompositions from ``root``, which made them, to the gradient workers."""

    root: int
    members: tuple[tuple[LayerSpec, Factor], ...]


@dataclass(frozen=True, slots=True)
class ShareGradients(Message):
    """Send preconditioned gradients from ``root``, a gradient worker, along its row."""

    root: int
    members: tuple[LayerSpec, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one layer's work is done."""

    layer: LayerSpec
    a_worker: int  # decomposes A
    g_worker: int  # decomposes G
    grad_workers: tuple[int, ...]

    def worker(self, factor: Factor) -> int:
        """Rank that decomposes the factor."""
        return self.a_worker if factor == "A" else self.g_worker


@dataclass(frozen=True, slots=True)
class Plan:
    """Placements, and the table of ops that follows from them.

    The contract of whoever executes it: every rank runs the subsequence of ops it takes part in,
    in the plan's order; messages start asynchronously; a stage ends when its messages have
    arrived. Shared messages thus meet in one order on all ranks: no deadlock.
    """

    world_size: int
    strategy: str
    method: str
    placements: tuple[Placement, ...]
    factors: tuple[Op, ...]
    decompose: tuple[Op, ...]
    precondition: tuple[Op, ...]

    def ops(self, *stages: Stage) -> Iterator[Op]:
        """Ops of the stages (all three by default), in order."""
        for stage in stages or tuple(Stage):
            yield from getattr(self, stage.value)

    def digest(self) -> str:
        """SHA-256 of the whole table; ranks compare it before they start."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def cubic_cost(n: int) -> float:
    """Work of decomposing an [n, n] factor, up to a constant."""
    return float(n) ** 3


def packed_numel(n: int) -> int:
    """Elements of one triangle of a symmetric [n, n] matrix, the diagonal included."""
    return n * (n + 1) // 2


def decomposition_numel(n: int, method: str) -> int:
    """Elements sent for one factor: values and vectors, or the inverse's triangle."""
    return n + n * n if method == "eigen" else packed_numel(n)


def make_plan(
    layers: Sequence[LayerSpec],
    world_size: int = 1,
    *,
    strategy: str = "comm_opt",
    grad_worker_fraction: float = 0.5,
    method: str = "eigen",
    cost: Callable[[int], float] = cubic_cost,
    bucket_numel: int = BUCKET_NUMEL,
) -> Plan:
    """Place layers on ranks and derive every op.

    ``grad_worker_fraction`` is read by ``hybrid_opt`` alone; ``cost`` balances decompositions.
    Ties go to the lower rank, so the result is the same everywhere. Raises ``ValueError`` for
    an unknown name or a fraction whose gradient workers do not divide the ranks.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: choose one of {', '.join(STRATEGIES)}")
    if method not in METHODS:
        raise ValueError(f"method={method!r}: choose one of {', '.join(METHODS)}")
    if not 0 <= grad_worker_fraction <= 1:
        raise ValueError(f"grad_worker_fraction={grad_worker_fraction:g}: must be in [0, 1]")
    fraction = {"comm_opt": 1.0, "hybrid_opt": grad_worker_fraction}.get(strategy, 0.0)
    workers = max(1, round(world_size * fraction))
    if world_size % workers:
        raise ValueError(
            f"grad_worker_fraction={fraction:g} of {world_size} ranks is {workers} gradient "
            f"workers, which do not divide the ranks; choose k/{world_size} with k a divisor"
        )
    placements = _place(layers, world_size, workers, strategy, cost)
    width = world_size // workers
    return Plan(
        world_size,
        strategy,
        method,
        placements,
        tuple(_factor_ops(placements, world_size, bucket_numel)),
        tuple(_decompose_ops(placements, method, bucket_numel)),
        tuple(_precondition_ops(placements, width, bucket_numel)),
    )


def _place(
    layers: Sequence[LayerSpec],
    world_size: int,
    workers: int,
    strategy: str,
    cost: Callable[[int], float],
) -> tuple[Placement, ...]:
    """Columns of the grid by longest-processing-time-first; ``layer_wise`` takes turns."""
    if strategy == "layer_wise":
        turns = [i % world_size for i in range(len(layers))]
        return tuple(Placement(s, r, r, (r,)) for s, r in zip(layers, turns, strict=True))
    width = world_size // workers
    columns = [tuple(range(c, world_size, width)) for c in range(width)]
    load = [0.0] * world_size

    def assign(column: tuple[int, ...], work: float) -> int:
        rank = min(column, key=lambda r: (load[r], r))
        load[rank] += work
        return rank

    placed: dict[str, Placement] = {}
    for spec in sorted(layers, key=lambda s: (-cost(s.a_dim) - cost(s.g_dim), s.name)):
        column = min(columns, key=lambda c: (sum(load[r] for r in c), c))
        if strategy == "comm_opt":  # section 4.3: factors of one layer on different workers
            heavy_first = sorted(FACTORS, key=lambda f: -cost(spec.dim(f)))
            worker = {f: assign(column, cost(spec.dim(f))) for f in heavy_first}
        else:
            rank = assign(column, cost(spec.a_dim) + cost(spec.g_dim))
            worker = dict.fromkeys(FACTORS, rank)
        placed[spec.name] = Placement(spec, worker["A"], worker["G"], column)
    return tuple(placed[s.name] for s in layers)


class _Bucket(Generic[T]):
    """Members with one set of ranks (and root) that travel in one message."""

    def __init__(self) -> None:
        self.members: list[T] = []
        self.numel = 0

    def add(self, member: T, numel: int) -> None:
        self.members.append(member)
        self.numel += numel


def _factor_ops(
    placements: Sequence[Placement], world_size: int, bucket_numel: int
) -> Iterator[Op]:
    world = tuple(range(world_size))
    bucket: _Bucket[tuple[LayerSpec, Factor]] = _Bucket()
    index = 0
    for placement in reversed(placements):  # backward reaches the last layer first
        for factor in FACTORS:
            yield ComputeFactor(world, placement.layer, factor)
            bucket.add((placement.layer, factor), packed_numel(placement.layer.dim(factor)) + 1)
        if world_size > 1 and (bucket.numel >= bucket_numel or placement is placements[0]):
            yield ReduceFactors(world, index, bucket.numel, tuple(bucket.members))
            bucket, index = _Bucket(), index + 1


def _decompose_ops(placements: Sequence[Placement], method: str, bucket_numel: int) -> Iterator[Op]:
    open_buckets: dict[tuple[int, tuple[int, ...]], _Bucket[tuple[LayerSpec, Factor]]] = {}
    index = 0
    for placement in reversed(placements):
        for factor in FACTORS:
            root, ranks = placement.worker(factor), placement.grad_workers
            yield Decompose((root,), placement.layer, factor)
            if len(ranks) == 1:
                continue
            bucket = open_buckets.setdefault((root, ranks), _Bucket())
            numel = decomposition_numel(placement.layer.dim(factor), method)
            bucket.add((placement.layer, factor), numel)
            if bucket.numel >= bucket_numel:
                del open_buckets[root, ranks]
                yield ShareDecompositions(ranks, index, bucket.numel, root, tuple(bucket.members))
                index += 1
    for (root, ranks), bucket in open_buckets.items():
        yield ShareDecompositions(ranks, index, bucket.numel, root, tuple(bucket.members))
        index += 1


def _precondition_ops(
    placements: Sequence[Placement], width: int, bucket_numel: int
) -> Iterator[Op]:
    open_buckets: dict[int, _Bucket[LayerSpec]] = {}
    index = 0

    def share(root: int, bucket: _Bucket[LayerSpec]) -> ShareGradients:
        row = tuple(range(root // width * width, root // width * width + width))
        return ShareGradients(row, index, bucket.numel, root, tuple(bucket.members))

    for placement in reversed(placements):
        yield Precondition(placement.grad_workers, placement.layer)
        if width == 1:
            continue
        for root in placement.grad_workers:
            bucket = open_buckets.setdefault(root, _Bucket())
            bucket.add(placement.layer, placement.layer.a_dim * placement.layer.g_dim)
            if bucket.numel >= bucket_numel:
                yield share(root, open_buckets.pop(root))
                index += 1
    for root, bucket in open_buckets.items():
        yield share(root, bucket)
        index += 1
