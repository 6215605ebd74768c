"""The processes of one run: who am I, and the few small agreements the trainer needs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from kfac_bench.core.distributed.collective import Collective, SingleProcess
from kfac_bench.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """One process among others; all ranks call every method together."""

    device: torch.device
    collective: Collective = field(default_factory=SingleProcess)

    @property
    def rank(self) -> int:
        """0 for the first."""
        return self.collective.rank

    @property
    def world_size(self) -> int:
        """How many there are."""
        return self.collective.world_size

    @property
    def is_main(self) -> bool:
        """Rank 0 writes events, configuration and manifests."""
        return self.rank == 0

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            self.collective.all_reduce(x, self._all, "ranks/sum").wait()
        return x

    def max(self, value: float) -> float:
        """Largest of the ranks' values."""
        if self.world_size == 1:
            return value
        each = torch.zeros(self.world_size, dtype=torch.float64, device=self.device)
        each[self.rank] = value
        return float(self.sum(each).max())

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes."""
        return self.max(float(flag)) > 0

    def together(self, action: Callable[[], T]) -> T:
        """What it returns on this rank; a :class:`UsageError` on one rank is raised on all."""
        done: list[T] = []
        said = b""
        try:
            done.append(action())
        except UsageError as error:
            if self.world_size == 1:
                raise
            said = str(error).encode()
        for rank, heard in enumerate(self.gather(said)):
            if heard:
                message = heard.decode()
                raise UsageError(message if rank == 0 else f"rank {rank}: {message}")
        return done[0]

    def gather(self, content: bytes) -> list[bytes]:
        """What each rank brings, by rank, on all of them."""
        if self.world_size == 1:
            return [content]
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(content)
        gathered = []
        for rank, size in enumerate(self.sum(sizes).tolist()):
            data = torch.zeros(size, dtype=torch.uint8, device=self.device)
            if size:
                if self.rank == rank:
                    data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
                self.collective.broadcast(data, rank, self._all, "ranks/gather").wait()
            gathered.append(data.cpu().numpy().tobytes())
        return gathered

    def unlike_main(self, what: str) -> list[int]:
        """Ranks whose ``what`` is not that of rank 0."""
        each = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        each[self.rank] = int(hashlib.sha256(what.encode()).hexdigest()[:12], 16)
        self.sum(each)
        return (each != each[0]).nonzero().flatten().tolist()

    def share_buffers(self, model: nn.Module) -> None:
        """Rank 0's buffers everywhere: batch-norm statistics drift between ranks."""
        if self.world_size > 1:
            for buffer in model.buffers():
                self.collective.broadcast(buffer, 0, self._all, "ranks/buffer").wait()
