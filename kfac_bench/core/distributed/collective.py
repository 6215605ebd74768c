"""What K-FAC asks of a communication backend, and who provides it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kfac_bench.core.distributed import horovod_collective


class Work(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Return when it has arrived."""


class Collective(Protocol):
    """Messages start asynchronously and work in place; ``name`` is equal on the ranks of one."""

    rank: int
    world_size: int

    def prepare(self, groups: Iterable[tuple[int, ...]], *, apart: bool = False) -> None:
        """Called once, by all ranks, with the same groups in the same order.

        ``apart``: messages may start in between others of the process, at other places on other
        ranks.
        """

    def all_reduce(self, x: Tensor, ranks: tuple[int, ...], name: str) -> Work:
        """Sum over ``ranks``."""

    def reduce(self, x: Tensor, root: int, ranks: tuple[int, ...], name: str) -> Work:
        """Sum over ``ranks``, which only ``root``, one of them, gets; elsewhere x is spoilt."""

    def broadcast(self, x: Tensor, root: int, ranks: tuple[int, ...], name: str) -> Work:
        """Copy from ``root``, one of them, to ``ranks``."""


class TorchCollective:
    """torch.distributed: gloo on CPUs, NCCL on GPUs; the default group, or ``group``'s ranks.

    ``rank`` and ``ranks`` are then positions in the group, as of one stage of a pipeline.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._global = dist.get_process_group_ranks(group)
        # Any: new_group's type also has the "not a member" number, which K-FAC never sends to
        self._groups: dict[tuple[int, ...], Any] = {
            tuple(range(self.world_size)): group or dist.group.WORLD
        }

    def prepare(self, groups: Iterable[tuple[int, ...]], *, apart: bool = False) -> None:
        """Make each group once; every rank takes part, member or not."""
        of_world = len(self._global) == dist.get_world_size()
        if apart:  # the default group is others', too
            world = tuple(range(self.world_size))
            self._groups = {}
            groups = [world, *groups]
        for ranks in groups:
            if ranks in self._groups or not (of_world or self.rank in ranks):
                continue  # ranks outside this collective know nothing of its groups: members meet
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
    """A world of one, whose plan holds no messages."""

    rank, world_size = 0, 1

    def prepare(self, groups: Iterable[tuple[int, ...]], *, apart: bool = False) -> None:
        """Nothing to set up."""

    def all_reduce(self, x: Tensor, ranks: tuple[int, ...], name: str) -> Work:
        """Never called."""
        raise AssertionError("a one-rank plan sends nothing")

    def reduce(self, x: Tensor, root: int, ranks: tuple[int, ...], name: str) -> Work:
        """Never called."""
        raise AssertionError("a one-rank plan sends nothing")

    def broadcast(self, x: Tensor, root: int, ranks: tuple[int, ...], name: str) -> Work:
        """Never called."""
        raise AssertionError("a one-rank plan sends nothing")


def default_collective() -> Collective:
    """torch.distributed or Horovod, initialised with several ranks, else this process alone."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return TorchCollective()
    if horovod_collective.has_ranks():
        return horovod_collective.HorovodCollective()
    return SingleProcess()


class PlansDifferError(RuntimeError):
    """Ranks made different plans: they would wait for each other's messages forever."""


def check_same_on_all_ranks(collective: Collective, what: str, device: torch.device) -> None:
    """Raise it on every rank if ``what`` differs on one, before anything can hang."""
    if collective.world_size == 1 or device.type == "meta":  # one rank, or a plan of many
        return
    digest = hashlib.sha256(what.encode()).hexdigest()
    world = tuple(range(collective.world_size))
    # 16 bits an element: exact in any dtype a backend reduces, and small enough to sum
    mine = torch.tensor([int(digest[i : i + 4], 16) for i in range(0, 64, 4)], device=device)
    first = mine.clone()
    collective.broadcast(first, 0, world, "check/digest").wait()
    differ = torch.zeros(collective.world_size, dtype=torch.int64, device=device)
    differ[collective.rank] = int(not torch.equal(mine, first))
    collective.all_reduce(differ, world, "check/differ").wait()
    if differ.any():
        ranks = differ.nonzero().flatten().tolist()
        raise PlansDifferError(
            f"ranks {ranks} made another K-FAC plan than rank 0: every rank must build the same "
            "model and pass the same options"
        )
