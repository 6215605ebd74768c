"""List the ops of each stage of a step, given where the work of each layer is placed."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from kfac_bench.core.planning.estimate import (
    decomposition_numel,
    factor_numel,
    has_second_moment,
    packed_numel,
)
from kfac_bench.core.planning.layer_spec import Factor, LayerSpec
from kfac_bench.core.planning.plan import (
    ComputeFactor,
    ComputeSecondMoment,
    Decompose,
    GatherGradients,
    Message,
    Op,
    Placement,
    Precondition,
    ReduceFactors,
    ReduceProducts,
    ReduceScales,
    ReduceSecondMoments,
    ShareDecompositions,
    ShareGradients,
    Strategy,
)

Destination = TypeVar("Destination", bound=Hashable)
Member = TypeVar("Member")
MakeMessage = Callable[[Destination, int, int, tuple[Member, ...]], Message]
"""Makes a message from its destination, its index, its number of elements and its members."""


class Buckets(Generic[Destination, Member]):
    """One open bucket for each destination, and the loop that closes buckets into messages.

    A destination says who gets the members, for example a root and a group of ranks. A bucket
    closes when it holds ``full_numel`` elements, so a message leaves while later members are still
    computed. Messages are numbered in the order in which they close.
    """

    def __init__(self, full_numel: int, make: MakeMessage[Destination, Member]) -> None:
        self._full_numel, self._make = full_numel, make
        self._open: dict[Destination, list[Member]] = {}
        self._numel: dict[Destination, int] = {}
        self._closed = 0

    def add(self, destination: Destination, numel: int, *members: Member) -> Iterator[Message]:
        """Add members of ``numel`` elements in total; yield the message if its bucket is full."""
        self._open.setdefault(destination, []).extend(members)
        self._numel[destination] = self._numel.get(destination, 0) + numel
        if self._numel[destination] >= self._full_numel:
            yield self._close(destination)

    def close_all(self) -> Iterator[Message]:
        """Yield the messages of all open buckets, the one that was opened first at the start."""
        for destination in list(self._open):
            yield self._close(destination)

    def _close(self, destination: Destination) -> Message:
        members, numel = tuple(self._open.pop(destination)), self._numel.pop(destination)
        self._closed += 1
        return self._make(destination, self._closed - 1, numel, members)


def batches(
    members: Iterable[Member],
    key: Callable[[Member], Hashable],
    numel: Callable[[Member], int],
    full_numel: int,
) -> Iterator[tuple[Member, ...]]:
    """Yield batches of members with equal ``key``, in the order in which the keys first appear.

    A batch has at most ``full_numel`` elements, or a single member.
    """
    batches_of: dict[Hashable, list[list[Member]]] = {}
    for member in members:
        # A batch that is full stays as it is: later members of its key open another one.
        same_key = batches_of.setdefault(key(member), [[]])
        if same_key[-1] and (len(same_key[-1]) + 1) * numel(member) > full_numel:
            same_key.append([])
        same_key[-1].append(member)
    for same_key in batches_of.values():
        yield from map(tuple, same_key)


Unit = tuple[Placement, tuple[Factor, ...]]
"""The factors of one layer that must be decomposed at the same step."""
FactorMember = tuple[LayerSpec, Factor]
RootAndRanks = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class StageOps:
    """The ops that follow from the ``placements`` and the strategy; the planner joins them.

    Layers are walked in reverse: backward reaches the last layer first, so its statistics can be
    sent while those of earlier layers are still computed.
    """

    placements: Sequence[Placement]
    strategy: Strategy
    world_size: int
    method: str
    bucket_numel: int
    batch_numel: int
    itemsize: int

    @cached_property
    def _world(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))

    def factors(self) -> list[Op]:
        """Return the ops that compute and reduce the statistics of A and G."""
        ops = list(self._compute_and_reduce_factors())
        if self.itemsize == 4 or not any(isinstance(op, Message) for op in ops):
            return ops
        # In half precision all ranks must agree on scales first, or sums overflow or vanish.
        members = tuple((p.layer, f) for p in reversed(self.placements) for f in p.layer.factors)
        return [
            *(op for op in ops if not isinstance(op, Message)),
            ReduceScales(self._world, 0, 2 * len(members), members),
            *(op for op in ops if isinstance(op, Message)),
        ]

    def _compute_and_reduce_factors(self) -> Iterator[Op]:
        buckets = Buckets[int | None, FactorMember](
            self.bucket_numel,
            lambda root, index, numel, members: ReduceFactors(
                self._world, index, numel, members, root, itemsize=self.itemsize
            ),
        )
        local = self.strategy.factors == "local"
        weight_numel = 1 if self.itemsize == 4 else 0  # half precision sends it with the scales
        for placement in reversed(self.placements):
            spec = placement.layer
            members_of: dict[int | None, list[FactorMember]] = {}
            for f in spec.factors:
                worker = placement.worker(f)
                yield ComputeFactor((worker,) if local else self._world, spec, f)
                root = None if self.strategy.factors == "all" else worker
                members_of.setdefault(root, []).append((spec, f))
            if self.world_size == 1 or local:
                continue
            for root, members in members_of.items():
                numel = sum(packed_numel(*member) + weight_numel for member in members)
                yield from buckets.add(root, numel, *members)
        yield from buckets.close_all()

    def second_moments(self) -> Iterator[Op]:
        """Yield the ops that compute and reduce EKFAC's second moments."""
        buckets = Buckets[None, LayerSpec](
            self.bucket_numel,
            lambda _, index, numel, members: ReduceSecondMoments(
                self._world, index, numel, members
            ),
        )
        for placement in reversed(self.placements):
            spec = placement.layer
            if has_second_moment(spec, self.method):
                yield ComputeSecondMoment(self._world, spec)
                if self.world_size > 1:
                    yield from buckets.add(None, spec.grad_numel + 1, spec)
        yield from buckets.close_all()

    def slices(self, units_of_slices: Sequence[Sequence[Unit]]) -> tuple[tuple[Op, ...], ...]:
        """Return, for each slice, the ops that decompose its factors and share the results."""
        # One object for all slices, because a message's name must be unique in the plan.
        buckets = Buckets[RootAndRanks, FactorMember](
            self.bucket_numel,
            lambda to, index, numel, members: ShareDecompositions(
                to[1], index, numel, to[0], members, itemsize=self.itemsize
            ),
        )
        return tuple(tuple(self._decompose(units, buckets)) for units in units_of_slices)

    def _decompose(
        self, units: Sequence[Unit], buckets: Buckets[RootAndRanks, FactorMember]
    ) -> Iterator[Op]:
        def by_all(spec: LayerSpec, factor: Factor) -> bool:
            # Each gradient worker decomposes a diagonal itself: that is cheaper than a message.
            return self.strategy.factors == "all" and spec.is_diagonal(factor)

        def ranks(member: tuple[Placement, Factor]) -> tuple[int, ...]:
            p, f = member
            return p.grad_workers if by_all(p.layer, f) else (p.worker(f),)

        for batch in batches(
            [(p, f) for p, factors in units for f in factors],
            key=lambda m: (ranks(m), m[0].grad_workers, m[0].layer.factor_shape(m[1])),
            numel=lambda m: factor_numel(m[0].layer, m[1]),
            full_numel=self.batch_numel,
        ):
            yield Decompose(ranks(batch[0]), tuple((p.layer, f) for p, f in batch))
            for p, f in batch:
                if len(p.grad_workers) > 1 and not by_all(p.layer, f):
                    numel = decomposition_numel(p.layer, f, self.method, self.itemsize)
                    yield from buckets.add((p.worker(f), p.grad_workers), numel, (p.layer, f))
        yield from buckets.close_all()

    def precondition(self) -> Iterator[Op]:
        """Yield the ops that precondition gradients and send them along the rows of the grid."""

        def message(root: int, index: int, numel: int, members: tuple[LayerSpec, ...]) -> Message:
            first = root // width * width
            return ShareGradients(tuple(range(first, first + width)), index, numel, root, members)

        buckets = Buckets[int, LayerSpec](self.bucket_numel, message)
        for batch in batches(
            reversed(self.placements),
            key=lambda p: (
                p.grad_workers,
                p.layer.factor_shape("A"),
                p.layer.factor_shape("G"),
                p.layer.a_blocks,  # divided by channels, so equal shapes may have other blocks
                p.layer.orthogonal_steps,
                p.layer.is_lookup,
            ),
            numel=lambda p: p.layer.grad_numel,
            full_numel=self.batch_numel,
        ):
            workers = batch[0].grad_workers
            width = self.world_size // len(workers)  # ranks in a row of the grid
            yield Precondition(workers, tuple(p.layer for p in batch))
            if width > 1:
                for p in batch:
                    for root in workers:
                        yield from buckets.add(root, p.layer.grad_numel, p.layer)
        yield from buckets.close_all()

    def gather_gradients(self) -> Iterator[Op]:
        """Yield the messages that bring whole gradients to their gradient workers.

        A single gradient worker is the root of its message; several get the sum as all ranks do.
        """
        buckets = Buckets[int | None, LayerSpec](
            self.bucket_numel,
            lambda root, index, numel, members: GatherGradients(
                self._world, index, numel, root, members
            ),
        )
        for placement in reversed(self.placements):
            workers, spec = placement.grad_workers, placement.layer
            root = workers[0] if len(workers) == 1 else None
            yield from buckets.add(root, spec.grad_numel, spec)
        yield from buckets.close_all()

    def reduce_products(self) -> Op:
        """Return the message that sums <p, g>, <p, p>, <g, g> and <w, w> over ranks, by layer."""
        return ReduceProducts(self._world, 0, 4 * len(self.placements))
