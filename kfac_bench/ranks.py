"""The processes of one run: who am I, and the few small agreements the trainer needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kfac_bench.errors import UsageError


@dataclass(frozen=True)
class Ranks:
    """One process among ``world_size``; all ranks call every method together."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Rank 0 writes events, configuration and manifests."""
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def max(self, value: float) -> float:
        """Largest of the ranks' values."""
        if self.world_size == 1:
            return value
        x = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return float(x)

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes."""
        return self.max(float(flag)) > 0

    def share_buffers(self, model: nn.Module) -> None:
        """Rank 0's buffers everywhere: batch-norm statistics drift between ranks."""
        if self.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)


@contextmanager
def join(device: str = "auto") -> Iterator[Ranks]:
    """Join the ranks that torchrun (or anything that sets its variables) started; leave at exit.

    Without RANK and WORLD_SIZE this process is alone.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("trainer.device=cuda: torch sees no GPU here; use trainer.device=cpu")
    use_cuda = device != "cpu" and torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(on)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks(0, 1, on)
        return
    dist.init_process_group("nccl" if use_cuda else "gloo", device_id=on if use_cuda else None)
    try:
        yield Ranks(dist.get_rank(), world_size, on)
    finally:
        # Without it a gloo process now and then aborts at exit, its work done.
        dist.destroy_process_group()
