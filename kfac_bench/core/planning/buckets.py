"""Fill messages and batches: which members of a plan travel, or are computed, together.

The planner calls both functions of this file; neither knows what its members are.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from kfac_bench.core.planning.ops import Message

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
