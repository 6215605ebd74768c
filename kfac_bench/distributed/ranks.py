"""The ranks of a run: a process's place among the others, and small agreements between them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kfac_bench.core.distributed.collective import (
    Collective,
    SingleProcess,
    Work,
    ranks_unlike_first,
)
from kfac_bench.errors import UsageError, first_line

T = TypeVar("T")


class _Done:
    """A message that has arrived, because there are no other ranks."""

    def wait(self) -> None:
        """Return at once."""


def lost_rank(error: BaseException) -> str | None:
    """Return one line if the error says that another rank is gone, else None."""
    # NCCL raises DistError, but gloo raises a plain RuntimeError with its name in the text.
    is_lost = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
    if not (isinstance(error, RuntimeError) and is_lost):
        return None
    line = first_line(error).partition(". This is typically")[0]
    # gloo begins with the place in its C++ source, which tells a user nothing.
    return re.sub(r"\[\S*/\S*:\d+\] ", "", line)


@dataclass(frozen=True)
class Ranks:
    """One process among the others of a run. All ranks call every method together."""

    device: torch.device
    collective: Collective = field(default_factory=SingleProcess)

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return self.collective.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.collective.world_size

    @property
    def is_main(self) -> bool:
        """True if this is rank 0, which writes events, configuration and manifests."""
        return self.rank == 0

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x` over ranks in place, and return it."""
        self.start_sum(x).wait()
        return x

    def start_sum(self, x: Tensor) -> Work:
        """Start to sum `x` over ranks in place; `wait` of the result ends when `x` is the sum."""
        if self.world_size == 1:
            return _Done()
        return self.collective.all_reduce(x, self._all, "ranks/sum")

    def sum_numbers(self, values: Sequence[float]) -> list[float]:
        """Return the sums over ranks of numbers that are on the host. It waits for other ranks."""
        if self.world_size == 1:
            return list(values)
        summed = self.sum(torch.tensor(values, dtype=torch.float64, device=self.device))
        return list(summed.tolist())

    def max(self, value: float) -> float:
        """Return the largest of the ranks' values."""
        if self.world_size == 1:
            return value
        # A sum over one place per rank needs no other operation of the collective than all_reduce.
        each = torch.zeros(self.world_size, dtype=torch.float64, device=self.device)
        each[self.rank] = value
        return float(self.sum(each).max())

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""
        return self.max(float(flag)) > 0

    def together(self, action: Callable[[], T]) -> T:
        """Run `action` on each rank, and return this rank's result.

        Raises:
            UsageError: On all ranks, if one rank raised it. Otherwise the other ranks would wait
                for messages of a rank that has ended.
        """
        results: list[T] = []
        problem = ""
        try:
            results.append(action())
        except UsageError as error:
            if self.world_size == 1:
                raise
            problem = str(error)
        for rank, content in enumerate(self.gather(problem.encode())):
            if content:
                message = content.decode()
                raise UsageError(message if rank == 0 else f"rank {rank}: {message}")
        return results[0]

    def gather(self, content: bytes) -> list[bytes]:
        """Return the content of every rank, in the order of ranks, on every rank."""
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
        """Return the ranks whose `what` differs from rank 0's."""
        return ranks_unlike_first(self.collective, what, self.device)

    def share_buffers(self, model: nn.Module) -> None:
        """Copy rank 0's buffers to all ranks: batch-norm statistics drift between ranks."""
        if self.world_size > 1:
            for buffer in model.buffers():
                content = buffer.contiguous()  # gloo reads past the gaps of another layout
                self.collective.broadcast(content, 0, self._all, "ranks/buffer").wait()
                if content is not buffer:
                    buffer.copy_(content)
