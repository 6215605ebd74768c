"""What K-FAC needs of a communication backend, and the backends that provide it.

The executor sends the messages of the plan through a :class:`Collective`. Ranks in these methods
are ranks of the plan, from 0 to ``world_size - 1``.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kfac_bench.core.distributed import horovod_collective


class Work(Protocol):
    """A message in flight."""

    def wait(self) -> object:
        """Return when the message has arrived."""


class Collective(Protocol):
    """A communication backend whose messages start asynchronously and work in place.

    The ranks that take part in a message give it the same ``name``.
    """

    rank: int
    world_size: int

    def prepare(self, groups: Iterable[tuple[int, ...]], *, apart: bool = False) -> None:
        """Make the groups of ranks. All ranks call it once, with the same groups in one order.

        Args:
            groups: Sets of ranks that will exchange messages.
            apart: Whether messages may start between other messages of the process, at different
                places on different ranks. They must not be confused then.
        """

    def all_reduce(self, x: Tensor, ranks: tuple[int, ...], name: str) -> Work:
        """Sum over ``ranks``."""

    def reduce(self, x: Tensor, root: int, ranks: tuple[int, ...], name: str) -> Work:
        """Sum over ``ranks``; only ``root``, one of them, gets the sum. Elsewhere x is invalid."""

    def broadcast(self, x: Tensor, root: int, ranks: tuple[int, ...], name: str) -> Work:
        """Copy from ``root``, one of ``ranks``, to all of them."""


class TorchCollective:
    """The backend of torch.distributed: gloo on CPUs, NCCL on GPUs.

    It spans the default group, or ``group``, for example one stage of a pipeline. ``rank`` and
    ``ranks`` are positions in that group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._global = dist.get_process_group_ranks(group or dist.group.WORLD)
        # Any: the type of new_group includes the number for "not a member", which is never used.
        self._groups: dict[tuple[int, ...], Any] = {
            tuple(range(self.world_size)): group or dist.group.WORLD
        }

    def prepare(self, groups: Iterable[tuple[int, ...]], *, apart: bool = False) -> None:
        """See :class:`Collective`. Every rank takes part in making a group, member or not."""
        of_world = len(self._global) == dist.get_world_size()
        if apart:
            # Others use the default group too, so K-FAC makes one of its own.
            world = tuple(range(self.world_size))
            self._groups = {}
            groups = [world, *groups]
        for ranks in groups:
            if ranks in self._groups or not (of_world or self.rank in ranks):
                continue  # ranks outside this collective do not call: only members meet
            self._groups[ranks] = dist.new_group(
                [self._global[r] for r in ranks], use_local_synchronization=not of_world
            )

    def all_reduce(self, x: Tensor, ranks: tuple[int, ...], name: str) -> Work:
        """See :class:`Collective`."""
        work: Work | None = dist.all_reduce(x, group=self._groups[ranks], async_op=True)
        assert work is not None
        return work

    def reduce(self, x: Tensor, root: int, ranks: tuple[int, ...], name: str) -> Work:
        """See :class:`Collective`."""
        to, group = self._global[root], self._groups[ranks]
        work: Work | None = dist.reduce(x, dst=to, group=group, async_op=True)
        assert work is not None
        return work

    def broadcast(self, x: Tensor, root: int, ranks: tuple[int, ...], name: str) -> Work:
        """See :class:`Collective`."""
        origin, group = self._global[root], self._groups[ranks]
        work: Work | None = dist.broadcast(x, src=origin, group=group, async_op=True)
        assert work is not None
        return work


class SingleProcess:
    """A world of one rank, whose plan has no messages."""

    rank, world_size = 0, 1

    def prepare(self, groups: Iterable[tuple[int, ...]], *, apart: bool = False) -> None:
        """Do nothing: there are no groups."""

    def all_reduce(self, x: Tensor, ranks: tuple[int, ...], name: str) -> Work:
        """Raise an error: nothing calls this."""
        raise AssertionError("a one-rank plan sends nothing")

    def reduce(self, x: Tensor, root: int, ranks: tuple[int, ...], name: str) -> Work:
        """Raise an error: nothing calls this."""
        raise AssertionError("a one-rank plan sends nothing")

    def broadcast(self, x: Tensor, root: int, ranks: tuple[int, ...], name: str) -> Work:
        """Raise an error: nothing calls this."""
        raise AssertionError("a one-rank plan sends nothing")


def default_collective() -> Collective:
    """Return torch.distributed or Horovod if it has several ranks, else this process alone."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return TorchCollective()
    if horovod_collective.has_ranks():
        return horovod_collective.HorovodCollective()
    return SingleProcess()


class PlansDifferError(RuntimeError):
    """Ranks made different plans, so they would wait for each other forever."""


def check_same_on_all_ranks(collective: Collective, what: str, device: torch.device) -> None:
    """Check on every rank that ``what`` is equal on all ranks, before anything can hang.

    Raises:
        PlansDifferError: a rank has another ``what`` than rank 0.
    """
    if collective.world_size == 1 or device.type == "meta":  # nobody to compare with
        return
    digest = hashlib.sha256(what.encode()).hexdigest()
    world = tuple(range(collective.world_size))
    # 16 bits per element are exact in every dtype that a backend reduces, and small enough to sum.
    mine = torch.tensor([int(digest[i : i + 4], 16) for i in range(0, 64, 4)], device=device)
    first = mine.clone()
    collective.broadcast(first, 0, world, "check/digest").wait()
    # Every rank learns which ranks differ, so that all of them raise the same error.
    differ = torch.zeros(collective.world_size, dtype=torch.int64, device=device)
    differ[collective.rank] = int(not torch.equal(mine, first))
    collective.all_reduce(differ, world, "check/differ").wait()
    if differ.any():
        ranks = differ.nonzero().flatten().tolist()
        raise PlansDifferError(
            f"ranks {ranks} made another K-FAC plan than rank 0: every rank must build the same "
            "model and pass the same options"
        )
