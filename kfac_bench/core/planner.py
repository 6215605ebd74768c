"""From layer shapes, world size and strategy to a :class:`Plan`: a pure function, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from kfac_bench.core.plan import (
    FACTORS,
    METHODS,
    STRATEGIES,
    ComputeFactor,
    ComputeSecondMoment,
    Decompose,
    Factor,
    LayerSpec,
    Op,
    Placement,
    Plan,
    Precondition,
    ReduceFactors,
    ReduceScales,
    ReduceSecondMoments,
    ShareDecompositions,
    ShareGradients,
)

T = TypeVar("T")
Member = tuple[LayerSpec, Factor]
Cost = Callable[[int], float]

BUCKET_NUMEL = 1 << 22
"""Elements a message collects before it is sent (16 MiB of fp32): far beyond where latency
matters, small enough that the first message leaves while later ones are still computed."""


def cubic_cost(n: int) -> float:
    """Work of decomposing an [n, n] matrix, up to a constant."""
    return float(n) ** 3


def factor_numel(spec: LayerSpec, factor: Factor) -> int:
    """Elements of a factor as it is stored."""
    return math.prod(spec.factor_shape(factor))


def packed_numel(spec: LayerSpec, factor: Factor) -> int:
    """Elements of a factor as it is sent: of each block one triangle, its diagonal included."""
    n = spec.dim(factor)
    return spec.groups * (n if spec.diagonal(factor) else n * (n + 1) // 2)


def decomposition_numel(spec: LayerSpec, factor: Factor, method: str, itemsize: int = 4) -> int:
    """Elements sent for one decomposition: values and vectors, or the inverse's triangle.

    In half precision an fp32 value takes two elements, and each inverse has one, its size.
    """
    n, values_each = spec.dim(factor), 4 // itemsize
    if method == "inverse":
        return packed_numel(spec, factor) + (spec.groups * values_each if itemsize < 4 else 0)
    return spec.groups * (n * values_each + n * n)


def has_second_moment(spec: LayerSpec, method: str) -> bool:
    """Whether EKFAC rescales the layer; where a factor is diagonal, it stays with K-FAC's."""
    return method == "ekfac" and not (spec.a_diagonal or spec.g_diagonal)


def make_plan(
    layers: Sequence[LayerSpec],
    world_size: int = 1,
    *,
    strategy: str = "comm_opt",
    grad_worker_fraction: float = 0.5,
    method: str = "eigen",
    spread: int = 1,
    cost: Cost = cubic_cost,
    bucket_numel: int = BUCKET_NUMEL,
    batch_numel: int = 0,
    itemsize: int = 4,
) -> Plan:
    """Place layers on ranks and derive every op.

    ``grad_worker_fraction`` is read by ``hybrid_opt`` alone; ``cost`` balances decompositions
    over ranks and over at most ``spread`` slices; equal shapes form one batch of at most
    ``batch_numel`` elements; ``itemsize`` is that of the plan. Ties go to the lower rank, so the
    result is the same everywhere. Raises ``ValueError`` for an unknown name or a fraction whose
    gradient workers do not divide the ranks.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: choose one of {', '.join(STRATEGIES)}")
    if method not in METHODS:
        raise ValueError(f"method={method!r}: choose one of {', '.join(METHODS)}")
    workers = _gradient_workers(strategy, grad_worker_fraction, world_size)
    if method == "ekfac" and workers < world_size:
        raise ValueError(
            f"method=ekfac needs the eigenvectors of each layer on all ranks, strategy={strategy} "
            "keeps them on some: choose comm_opt"
        )
    placements = _place(layers, world_size, workers, strategy, cost)
    slices = _slice(placements, method, spread, cost)
    index = _Counter()
    return Plan(
        world_size,
        strategy,
        method,
        placements,
        (
            *_factor_ops(placements, world_size, bucket_numel, itemsize),
            *_second_moment_ops(placements, method, world_size, bucket_numel),
        ),
        tuple(
            tuple(_decompose_ops(s, method, bucket_numel, batch_numel, itemsize, index))
            for s in slices
        ),
        tuple(_precondition_ops(placements, world_size // workers, bucket_numel, batch_numel)),
        itemsize,
    )


def _gradient_workers(strategy: str, fraction: float, world_size: int) -> int:
    if not 0 <= fraction <= 1:
        raise ValueError(f"grad_worker_fraction={fraction:g}: must be in [0, 1]")
    fraction = {"comm_opt": 1.0, "hybrid_opt": fraction}.get(strategy, 0.0)
    workers = max(1, round(world_size * fraction))
    if world_size % workers:
        raise ValueError(
            f"grad_worker_fraction={fraction:g} of {world_size} ranks is {workers} gradient "
            f"workers, which do not divide the ranks; choose k/{world_size} with k a divisor"
        )
    return workers


def _work(spec: LayerSpec, factor: Factor, cost: Cost) -> float:
    return 0.0 if spec.diagonal(factor) else spec.groups * cost(spec.dim(factor))


def _place(
    layers: Sequence[LayerSpec], world_size: int, workers: int, strategy: str, cost: Cost
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
    for spec in sorted(layers, key=lambda s: (-sum(_work(s, f, cost) for f in FACTORS), s.name)):
        column = min(columns, key=lambda c: (sum(load[r] for r in c), c))
        work = {f: _work(spec, f, cost) for f in FACTORS}
        if strategy == "comm_opt":  # section 4.3: factors of one layer on different workers
            heavy_first = sorted(FACTORS, key=lambda f: -work[f])
            worker = {f: assign(column, work[f]) for f in heavy_first}
        else:
            worker = dict.fromkeys(FACTORS, assign(column, sum(work.values())))
        placed[spec.name] = Placement(spec, worker["A"], worker["G"], column)
    return tuple(placed[s.name] for s in layers)


Unit = tuple[Placement, tuple[Factor, ...]]
"""Factors that are decomposed at the same step."""


def _slice(
    placements: Sequence[Placement], method: str, spread: int, cost: Cost
) -> list[list[Unit]]:
    """At most ``spread`` parts of about equal work; more than total / largest gains nothing.

    Ranks play no part in it: what is decomposed when is the same on any number of them. EKFAC
    measures second moments in a layer's eigenbasis, so both its factors change together.
    """
    together: list[tuple[Factor, ...]] = [FACTORS] if method == "ekfac" else [("A",), ("G",)]
    units: list[Unit] = [(p, fs) for p in reversed(placements) for fs in together]
    work = [sum(_work(p.layer, f, cost) for f in fs) for p, fs in units]
    some = [w for w in work if w > 0]
    count = min(spread, len(some), math.ceil(sum(some) / max(some))) if some else 1
    load = [0.0] * count
    part_of = {}
    for i in sorted(range(len(units)), key=lambda i: (-work[i], i)):
        part_of[i] = load.index(min(load))
        load[part_of[i]] += work[i]
    return [[u for i, u in enumerate(units) if part_of[i] == k] for k in range(count)]


class _Counter:
    """Numbers messages of one kind."""

    def __init__(self) -> None:
        self.next = 0

    def take(self) -> int:
        self.next += 1
        return self.next - 1


class _Bucket(Generic[T]):
    """Members with one set of ranks (and root) that travel in one message."""

    def __init__(self) -> None:
        self.members: list[T] = []
        self.numel = 0

    def add(self, member: T, numel: int) -> None:
        self.members.append(member)
        self.numel += numel


def _batches(
    items: Iterable[T], key: Callable[[T], Hashable], numel: Callable[[T], int], most: int
) -> Iterator[tuple[T, ...]]:
    """Items of equal ``key`` together, at most ``most`` elements; in order of first appearance."""
    open_batches: dict[Hashable, list[list[T]]] = {}
    for item in items:
        batches = open_batches.setdefault(key(item), [[]])
        if batches[-1] and (len(batches[-1]) + 1) * numel(item) > most:
            batches.append([])
        batches[-1].append(item)
    for batches in open_batches.values():
        yield from map(tuple, batches)


def _factor_ops(
    placements: Sequence[Placement], world_size: int, bucket_numel: int, itemsize: int
) -> Iterator[Op]:
    """Messages leave while later factors are computed; in half precision after the scales."""
    world, half = tuple(range(world_size)), itemsize < 4
    bucket: _Bucket[Member] = _Bucket()
    index = _Counter()
    members = [(p.layer, f) for p in reversed(placements) for f in FACTORS]  # as backward goes
    messages: list[Op] = []
    for member in members:
        yield ComputeFactor(world, *member)
        bucket.add(member, packed_numel(*member) + (0 if half else 1))
        full = bucket.numel >= bucket_numel and member[1] == FACTORS[-1]
        if world_size > 1 and (full or member is members[-1]):
            message = ReduceFactors(
                world, index.take(), bucket.numel, tuple(bucket.members), itemsize=itemsize
            )
            bucket = _Bucket()
            if half:
                messages.append(message)
            else:
                yield message
    if messages:
        yield ReduceScales(world, 0, 2 * len(members), tuple(members))
        yield from messages


def _second_moment_ops(
    placements: Sequence[Placement], method: str, world_size: int, bucket_numel: int
) -> Iterator[Op]:
    world = tuple(range(world_size))
    specs = [p.layer for p in reversed(placements) if has_second_moment(p.layer, method)]
    bucket: _Bucket[LayerSpec] = _Bucket()
    index = _Counter()
    for spec in specs:
        yield ComputeSecondMoment(world, spec)
        bucket.add(spec, spec.grad_numel + 1)
        if world_size > 1 and (bucket.numel >= bucket_numel or spec is specs[-1]):
            yield ReduceSecondMoments(world, index.take(), bucket.numel, tuple(bucket.members))
            bucket = _Bucket()


def _decompose_ops(
    units: Sequence[Unit],
    method: str,
    bucket_numel: int,
    batch_numel: int,
    itemsize: int,
    index: _Counter,
) -> Iterator[Op]:
    """A diagonal is decomposed by each gradient worker: cheaper than a message."""
    open_buckets: dict[tuple[int, tuple[int, ...]], _Bucket[Member]] = {}
    members = [(p, f) for p, factors in units for f in factors]

    def ranks(item: tuple[Placement, Factor]) -> tuple[int, ...]:
        p, f = item
        return p.grad_workers if p.layer.diagonal(f) else (p.worker(f),)

    for batch in _batches(
        members,
        key=lambda m: (ranks(m), m[0].grad_workers, m[0].layer.factor_shape(m[1])),
        numel=lambda m: factor_numel(m[0].layer, m[1]),
        most=batch_numel,
    ):
        yield Decompose(ranks(batch[0]), tuple((p.layer, f) for p, f in batch))
        for placement, factor in batch:
            root, receivers = placement.worker(factor), placement.grad_workers
            if len(receivers) == 1 or placement.layer.diagonal(factor):
                continue
            bucket = open_buckets.setdefault((root, receivers), _Bucket())
            numel = decomposition_numel(placement.layer, factor, method, itemsize)
            bucket.add((placement.layer, factor), numel)
            if bucket.numel >= bucket_numel:
                del open_buckets[root, receivers]
                yield _share(receivers, index, bucket, root, itemsize)
    for (root, receivers), bucket in open_buckets.items():
        yield _share(receivers, index, bucket, root, itemsize)


def _share(
    ranks: tuple[int, ...], index: _Counter, bucket: _Bucket[Member], root: int, itemsize: int
) -> ShareDecompositions:
    members = tuple(bucket.members)
    return ShareDecompositions(ranks, index.take(), bucket.numel, root, members, itemsize=itemsize)


def _precondition_ops(
    placements: Sequence[Placement], width: int, bucket_numel: int, batch_numel: int
) -> Iterator[Op]:
    open_buckets: dict[int, _Bucket[LayerSpec]] = {}
    index = _Counter()

    def share(root: int, bucket: _Bucket[LayerSpec]) -> ShareGradients:
        row = tuple(range(root // width * width, root // width * width + width))
        return ShareGradients(row, index.take(), bucket.numel, root, tuple(bucket.members))

    for batch in _batches(
        reversed(placements),
        key=lambda p: (p.grad_workers, p.layer.factor_shape("A"), p.layer.factor_shape("G")),
        numel=lambda p: p.layer.grad_numel,
        most=batch_numel,
    ):
        yield Precondition(batch[0].grad_workers, tuple(p.layer for p in batch))
        if width == 1:
            continue
        for placement in batch:
            for root in placement.grad_workers:
                bucket = open_buckets.setdefault(root, _Bucket())
                bucket.add(placement.layer, placement.layer.grad_numel)
                if bucket.numel >= bucket_numel:
                    yield share(root, open_buckets.pop(root))
    for root, bucket in open_buckets.items():
        yield share(root, bucket)
