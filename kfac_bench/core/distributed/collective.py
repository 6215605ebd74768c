"""The interface of a communication backend, and the backends that K-FAC has.

The executor sends the messages of the plan through a :class:`Collective`. Ranks in these methods
are ranks of the plan, from 0 to ``world_size - 1``. Only making a :class:`HorovodCollective`
imports Horovod, which fuses messages and agrees on their order by name.
"""

import hashlib
import importlib
import itertools
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kfac_bench.core.distributed.dtensor import is_sharded


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


_made: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
"""The groups that were made inside a group. The next KFAC uses them again, because torch keeps the
sockets and threads of a group, or its memory on a GPU, until the process ends."""


class TorchCollective:
    """The backend of torch.distributed: gloo on CPUs, NCCL on GPUs.

    It spans the default group, or ``group``, for example one stage of a pipeline. ``rank`` and
    ``ranks`` are positions in that group.

    Raises:
        ValueError: This process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process group of K-FAC: build K-FAC on the "
                "ranks of the group only"
            )
        # Any: the type of new_group includes the number for "not a member", which is never used.
        self._parent: Any = group or dist.group.WORLD
        self._global = dist.get_process_group_ranks(self._parent)
        self._groups: dict[tuple[int, ...], Any] = {tuple(range(self.world_size)): self._parent}

    def prepare(self, groups: Iterable[tuple[int, ...]], *, apart: bool = False) -> None:
        """See :class:`Collective`. Every rank takes part in making a group, member or not."""
        of_world = len(self._global) == dist.get_world_size()
        made = _made.setdefault(self._parent, {})
        if apart:
            # Others use the default group too, so K-FAC makes groups that nobody else uses.
            world = tuple(range(self.world_size))
            self._groups, made = {}, {}
            groups = [world, *groups]
        for ranks in groups:
            if ranks in self._groups or not (of_world or self.rank in ranks):
                continue  # ranks outside this collective do not call: only members meet
            if ranks not in made:
                made[ranks] = dist.new_group(
                    [self._global[r] for r in ranks],
                    timeout=_timeout_of(self._parent),
                    # By default torch takes the backend of the default group, perhaps another one.
                    backend=dist.get_backend(self._parent),
                    use_local_synchronization=not of_world,
                )
            self._groups[ranks] = made[ranks]

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


def _timeout_of(group: Any) -> timedelta | None:
    """Return the time that a message of the group may take; None if its backend has no options."""
    # A new group does not inherit it: torch would use its own default of 10 or 30 minutes.
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)


class SingleProcess:
    """A world of one rank, whose plan has no messages."""

    rank, world_size = 0, 1

    def prepare(self, groups: Iterable[tuple[int, ...]], *, apart: bool = False) -> None:
        """Do nothing: there are no groups."""

    def _send(self, *arguments: object) -> Work:
        raise AssertionError("a one-rank plan sends nothing")

    all_reduce = reduce = broadcast = _send


def default_collective(model: nn.Module) -> Collective:
    """Return torch.distributed or Horovod if it has several ranks, else this process alone.

    If DistributedDataParallel averages the gradients of ``model`` over some ranks, these ranks are
    the collective. Ranks that hold parts of parameters are always in it.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        # The model may be anything: it is checked later.
        modules = [*model.modules()] if isinstance(model, nn.Module) else []
        ddp = nn.parallel.DistributedDataParallel
        groups = {module.process_group for module in modules if isinstance(module, ddp)}
        if len(groups) != 1 or any(map(is_sharded, model.parameters())):
            return TorchCollective()
        return TorchCollective(groups.pop())
    if horovod_has_ranks():
        return HorovodCollective()
    return SingleProcess()


class PlansDifferError(RuntimeError):
    """Ranks made different plans, so they would wait for each other forever."""


def check_same_on_all_ranks(collective: Collective, what: str, device: torch.device) -> None:
    """Check on every rank that ``what`` is equal on all ranks, before anything can hang.

    Raises:
        PlansDifferError: a rank has another ``what`` than rank 0.
    """
    if ranks := ranks_unlike_first(collective, what, device):
        raise PlansDifferError(
            f"ranks {ranks} made another K-FAC plan than rank 0: every rank must build the same "
            "model and pass the same options"
        )


def ranks_unlike_first(collective: Collective, what: str, device: torch.device) -> list[int]:
    """Return the ranks whose ``what`` differs from that of rank 0. All ranks call this."""
    if collective.world_size == 1 or device.type == "meta":  # nobody to compare with
        return []
    each = torch.zeros(collective.world_size, dtype=torch.int64, device=device)
    # 12 hexadecimal digits are 48 bits, which a sum in int64 cannot overflow.
    each[collective.rank] = int(hashlib.sha256(what.encode()).hexdigest()[:12], 16)
    world = tuple(range(collective.world_size))
    collective.all_reduce(each, world, "check/digest").wait()
    return (each != each[0]).nonzero().flatten().tolist()


AS_BITS = {torch.bfloat16: torch.float16, torch.bool: torch.uint8}
"""The dtype in which Horovod can broadcast the bits of a dtype that it does not support."""


class _Handle:
    """A message of Horovod in flight; see :class:`Work`."""

    def __init__(self, hvd: Any, handle: int, then: Callable[[], object] | None = None) -> None:
        self._hvd, self._handle, self._then = hvd, handle, then

    def wait(self) -> object:
        """Return when the message has arrived."""
        self._hvd.synchronize(self._handle)
        return self._then and self._then()


class HorovodCollective:
    """The ranks of Horovod, after ``hvd.init()``.

    A group of ranks is a process set. K-FAC knows its groups only after it has seen the model, so
    it adds process sets after ``init``. For ``strategy="hybrid_opt"`` call
    ``hvd.init(process_sets="dynamic")``. Horovod allows one process set per set of ranks, so K-FAC
    keeps process sets and uses them again.
    """

    _made = itertools.count()

    def __init__(self) -> None:
        self._hvd: Any = importlib.import_module("horovod.torch")
        self.rank, self.world_size = int(self._hvd.rank()), int(self._hvd.size())
        self._sets: dict[tuple[int, ...], Any] = {
            tuple(range(self.world_size)): self._hvd.global_process_set
        }
        # Horovod refuses a second message of the same name, and two K-FACs may send at a time.
        self._prefix = f"kfac{next(self._made)}"

    def prepare(self, groups: Iterable[tuple[int, ...]], *, apart: bool = False) -> None:
        """Make the process set of each group. Every rank takes part, member or not.

        ``apart`` changes nothing, because names tell messages apart in any order.

        Raises:
            RuntimeError: Horovod was initialized without dynamic process sets.
        """
        for ranks in groups:
            if ranks not in self._sets:
                self._sets[ranks] = self._process_set(ranks)

    def _process_set(self, ranks: tuple[int, ...]) -> Any:
        process_sets = importlib.import_module("horovod.common.process_sets")
        existing = process_sets._basics._get_process_set_ids_and_ranks()
        for number, members in existing.items():
            if tuple(members) == ranks:  # made by another K-FAC or by the user
                found = self._hvd.ProcessSet(ranks)
                found.process_set_id = number
                return found
        try:
            return self._hvd.add_process_set(ranks)
        except ValueError as error:
            why = str(error).partition("\n")[0]
            raise RuntimeError(
                f'K-FAC needs groups of ranks: call hvd.init(process_sets="dynamic") ({why})'
            ) from None

    def all_reduce(self, x: Tensor, ranks: tuple[int, ...], name: str) -> _Handle:
        """Sum over ``ranks``. bfloat16 is sent and summed as float32."""
        wide = x.float() if x.dtype == torch.bfloat16 else x
        handle = self._hvd.allreduce_async_(
            wide, name=f"{self._prefix}/{name}", op=self._hvd.Sum, process_set=self._sets[ranks]
        )
        return _Handle(self._hvd, handle, None if wide is x else lambda: x.copy_(wide))

    def reduce(self, x: Tensor, root: int, ranks: tuple[int, ...], name: str) -> _Handle:
        """Sum over ``ranks``. All of them get the sum: Horovod has no reduce to one rank."""
        return self.all_reduce(x, ranks, name)

    def broadcast(self, x: Tensor, root: int, ranks: tuple[int, ...], name: str) -> _Handle:
        """Copy from ``root``, a global rank, to ``ranks``."""
        bits = x.view(AS_BITS.get(x.dtype, x.dtype))
        handle = self._hvd.broadcast_async_(
            bits, root, name=f"{self._prefix}/{name}", process_set=self._sets[ranks]
        )
        return _Handle(self._hvd, handle)


def horovod_has_ranks() -> bool:
    """Return whether this process runs Horovod with several ranks. Nothing is imported."""
    hvd = sys.modules.get("horovod.torch")
    return hvd is not None and bool(hvd.is_initialized()) and int(hvd.size()) > 1
