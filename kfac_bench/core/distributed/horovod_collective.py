"""K-FAC's messages over Horovod, which fuses them and negotiates their order by name.

Horovod is imported here only where a :class:`HorovodCollective` is made.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

AS_BITS = {torch.bfloat16: torch.float16, torch.bool: torch.uint8}
"""What Horovod has no messages for, and what it copies as well."""


class _Handle:
    """A message under way; see :class:`kfac_bench.core.distributed.collective.Work`."""

    def __init__(self, hvd: Any, handle: int, then: Callable[[], object] | None = None) -> None:
        self._hvd, self._handle, self._then = hvd, handle, then

    def wait(self) -> object:
        """Return when it has arrived."""
        self._hvd.synchronize(self._handle)
        return self._then and self._then()


class HorovodCollective:
    """Horovod's ranks, after ``hvd.init()``; a group of some of them is a process set.

    K-FAC knows its groups when it has seen the model, so process sets are added after ``init``:
    for ``strategy="hybrid_opt"`` call ``hvd.init(process_sets="dynamic")``. Process sets are kept
    and used again: Horovod allows one for the same ranks.
    """

    _made = itertools.count()

    def __init__(self) -> None:
        self._hvd: Any = importlib.import_module("horovod.torch")
        self.rank, self.world_size = int(self._hvd.rank()), int(self._hvd.size())
        self._sets: dict[tuple[int, ...], Any] = {
            tuple(range(self.world_size)): self._hvd.global_process_set
        }
        # Of two messages of one name, Horovod refuses the second: two K-FACs may be under way.
        self._prefix = f"kfac{next(self._made)}"

    def prepare(self, groups: Iterable[tuple[int, ...]], *, apart: bool = False) -> None:
        """Make each group's process set once; every rank takes part, member or not.

        ``apart`` changes nothing: names tell messages apart, whatever order they start in.
        Raises ``RuntimeError`` where Horovod was initialised without dynamic process sets.
        """
        for ranks in groups:
            if ranks not in self._sets:
                self._sets[ranks] = self._process_set(ranks)

    def _process_set(self, ranks: tuple[int, ...]) -> Any:
        process_sets = importlib.import_module("horovod.common.process_sets")
        existing = process_sets._basics._get_process_set_ids_and_ranks()
        for number, members in existing.items():
            if tuple(members) == ranks:  # of another K-FAC, or the user's own
                found = self._hvd.ProcessSet(ranks)
                found.process_set_id = number
                return found
        try:
            return self._hvd.add_process_set(ranks)
        except ValueError as error:
            raise RuntimeError(
                'K-FAC needs groups of ranks: call hvd.init(process_sets="dynamic") '
                f"({str(error).splitlines()[0]})"
            ) from None

    def all_reduce(self, x: Tensor, ranks: tuple[int, ...], name: str) -> _Handle:
        """Sum over ``ranks``; bfloat16 travels, and is summed, as float32."""
        wide = x.float() if x.dtype == torch.bfloat16 else x
        handle = self._hvd.allreduce_async_(
            wide, name=f"{self._prefix}/{name}", op=self._hvd.Sum, process_set=self._sets[ranks]
        )
        return _Handle(self._hvd, handle, None if wide is x else lambda: x.copy_(wide))

    def reduce(self, x: Tensor, root: int, ranks: tuple[int, ...], name: str) -> _Handle:
        """Sum over ``ranks``, which all of them get: Horovod has no other."""
        return self.all_reduce(x, ranks, name)

    def broadcast(self, x: Tensor, root: int, ranks: tuple[int, ...], name: str) -> _Handle:
        """Copy from ``root``, a global rank, to ``ranks``."""
        bits = x.view(AS_BITS.get(x.dtype, x.dtype))
        handle = self._hvd.broadcast_async_(
            bits, root, name=f"{self._prefix}/{name}", process_set=self._sets[ranks]
        )
        return _Handle(self._hvd, handle)


def has_ranks() -> bool:
    """Whether this process runs Horovod with others; imports nothing."""
    hvd = sys.modules.get("horovod.torch")
    return hvd is not None and bool(hvd.is_initialized()) and int(hvd.size()) > 1
