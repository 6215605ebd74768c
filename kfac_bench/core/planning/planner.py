"""From layer shapes, world size and strategy to a :class:`Plan`: a pure function, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from kfac_bench.core.planning.cost import Cost, cubic_cost
from kfac_bench.core.planning.layer_spec import FACTORS, Factor, LayerSpec
from kfac_bench.core.planning.ops import (
    ComputeFactor,
    ComputeSecondMoment,
    Decompose,
    GatherGradients,
    Op,
    Precondition,
    ReduceFactors,
    ReduceProducts,
    ReduceScales,
    ReduceSecondMoments,
    ShareDecompositions,
    ShareGradients,
)
from kfac_bench.core.planning.placement import (
    columns,
    gradient_workers,
    place,
    place_in_turn,
    weigh,
    work_of,
)
from kfac_bench.core.planning.plan import (
    BALANCES,
    METHODS,
    STRATEGIES,
    STRATEGY_TABLE,
    Placement,
    Plan,
    Strategy,
)
from kfac_bench.core.planning.sizes import (
    decomposition_numel,
    factor_numel,
    has_second_moment,
    packed_numel,
)

T = TypeVar("T")
Member = tuple[LayerSpec, Factor]

BUCKET_NUMEL = 1 << 22
"""Elements a message collects before it is sent (16 MiB of fp32): far beyond where latency
matters, small enough that the first message leaves while later ones are still computed."""


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
    """Place layers on ranks and derive every op.

    ``grad_worker_fraction`` and ``colocate_factors`` are the strategy's own where None (and the
    fraction where it is not adjustable); ``cost`` balances decompositions over ranks (or
    ``balance`` the memory that they take) and over at most ``spread`` slices; equal shapes form
    one batch of at most ``batch_numel`` elements; ``itemsize`` and ``sharded`` are those of the
    plan. Ties go to the lower rank, so the result is the same everywhere. Raises ``ValueError``
    for an unknown name, a fraction whose gradient workers do not divide the ranks, or EKFAC where
    a rank lacks eigenvectors.
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
            f"method=ekfac needs the eigenvectors of each layer, of all ranks' statistics, on all "
            f"ranks, strategy={strategy} has them on some or of some: choose comm_opt"
        )
    if row.in_turn:
        placements = place_in_turn(layers, world_size)
    else:
        weights = weigh(balance, row.factors != "all", workers, cost, method, itemsize)
        colocate = row.colocate if colocate_factors is None else colocate_factors
        placements = place(layers, columns(world_size, workers), colocate, *weights)
    slices = _slice(placements, method, spread, cost)
    index = _Counter()
    return Plan(
        world_size,
        strategy,
        method,
        placements,
        (
            *_factor_ops(placements, row, world_size, bucket_numel, itemsize),
            *_second_moment_ops(placements, method, world_size, bucket_numel),
        ),
        tuple(
            tuple(_decompose_ops(s, row, method, bucket_numel, batch_numel, itemsize, index))
            for s in slices
        ),
        (
            *(_gather_ops(placements, world_size, bucket_numel) if sharded else ()),
            *_precondition_ops(placements, world_size // workers, bucket_numel, batch_numel),
            *(_product_ops(placements, world_size) if sharded else ()),
        ),
        itemsize,
        sharded,
    )


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
    work = [sum(work_of(p.layer, f, cost) for f in fs) for p, fs in units]
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
    placements: Sequence[Placement],
    row: Strategy,
    world_size: int,
    bucket_numel: int,
    itemsize: int,
) -> Iterator[Op]:
    """Messages leave while later factors are computed; in half precision after the scales."""
    world, half = tuple(range(world_size)), itemsize < 4
    buckets: dict[int | None, _Bucket[Member]] = {}
    index = _Counter()
    late: list[Op] = []

    def reduce(root: int | None) -> Iterator[Op]:
        bucket = buckets.pop(root)
        members = tuple(bucket.members)
        message = ReduceFactors(world, index.take(), bucket.numel, members, root, itemsize=itemsize)
        if half:
            late.append(message)
        else:
            yield message

    for placement in reversed(placements):  # as backward goes
        roots = {f: None if row.factors == "all" else placement.worker(f) for f in FACTORS}
        for f in FACTORS:
            member = placement.layer, f
            local = row.factors == "local"
            yield ComputeFactor((placement.worker(f),) if local else world, *member)
            if world_size > 1 and not local:
                bucket = buckets.setdefault(roots[f], _Bucket())
                bucket.add(member, packed_numel(*member) + (0 if half else 1))
        for root in dict.fromkeys(roots.values()):
            if root in buckets and buckets[root].numel >= bucket_numel:
                yield from reduce(root)
    for root in list(buckets):
        yield from reduce(root)
    if late:
        members = tuple((p.layer, f) for p in reversed(placements) for f in FACTORS)
        yield ReduceScales(world, 0, 2 * len(members), members)
        yield from late


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
    row: Strategy,
    method: str,
    bucket_numel: int,
    batch_numel: int,
    itemsize: int,
    index: _Counter,
) -> Iterator[Op]:
    """A diagonal is decomposed by each gradient worker that has it: cheaper than a message."""
    open_buckets: dict[tuple[int, tuple[int, ...]], _Bucket[Member]] = {}
    members = [(p, f) for p, factors in units for f in factors]

    def by_all(spec: LayerSpec, factor: Factor) -> bool:
        return row.factors == "all" and spec.diagonal(factor)

    def ranks(item: tuple[Placement, Factor]) -> tuple[int, ...]:
        p, f = item
        return p.grad_workers if by_all(p.layer, f) else (p.worker(f),)

    for batch in _batches(
        members,
        key=lambda m: (ranks(m), m[0].grad_workers, m[0].layer.factor_shape(m[1])),
        numel=lambda m: factor_numel(m[0].layer, m[1]),
        most=batch_numel,
    ):
        yield Decompose(ranks(batch[0]), tuple((p.layer, f) for p, f in batch))
        for placement, factor in batch:
            root, receivers = placement.worker(factor), placement.grad_workers
            if len(receivers) == 1 or by_all(placement.layer, factor):
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


def _gather_ops(
    placements: Sequence[Placement], world_size: int, bucket_numel: int
) -> Iterator[Op]:
    """To the only gradient worker, or to all ranks where there are several."""
    if world_size == 1:
        return
    world, index = tuple(range(world_size)), _Counter()
    open_buckets: dict[int | None, _Bucket[LayerSpec]] = {}

    def gather(root: int | None, bucket: _Bucket[LayerSpec]) -> GatherGradients:
        return GatherGradients(world, index.take(), bucket.numel, root, tuple(bucket.members))

    for placement in reversed(placements):
        workers = placement.grad_workers
        root = workers[0] if len(workers) == 1 else None
        bucket = open_buckets.setdefault(root, _Bucket())
        bucket.add(placement.layer, placement.layer.grad_numel)
        if bucket.numel >= bucket_numel:
            yield gather(root, open_buckets.pop(root))
    for root, bucket in open_buckets.items():
        yield gather(root, bucket)


def _product_ops(placements: Sequence[Placement], world_size: int) -> Iterator[Op]:
    if world_size > 1:
        yield ReduceProducts(tuple(range(world_size)), 0, 3 * len(placements))
