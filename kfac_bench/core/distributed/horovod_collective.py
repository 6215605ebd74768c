"""The communication backend of Horovod, which fuses messages and agrees on their order by name.

Only making a :class:`HorovodCollective` imports Horovod.
"""

import importlib
import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

AS_BITS = {torch.bfloat16: torch.float16, torch.bool: torch.uint8}
"""From a dtype that Horovod cannot broadcast to a dtype of the same size that it can."""


class _Handle:
    """A message in flight; see :class:`kfac_bench.core.distributed.collective.Work`."""

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


def has_ranks() -> bool:
    """Return whether this process runs Horovod with several ranks. Nothing is imported."""
    hvd = sys.modules.get("horovod.torch")
    return hvd is not None and bool(hvd.is_initialized()) and int(hvd.size()) > 1
