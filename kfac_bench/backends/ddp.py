"""PyTorch's DistributedDataParallel, started by torchrun: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kfac_bench.backends.backend import Backend, find_device
from kfac_bench.config import BackendConfig
from kfac_bench.core.collective import Collective, TorchCollective
from kfac_bench.ranks import Ranks


class DDP(Backend):
    """Gradients are averaged while backward runs."""

    def collective(self) -> Collective:
        """See :meth:`Backend.collective`."""
        return TorchCollective()

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """See :meth:`Backend.wrap`."""
        device = self.ranks.device
        on = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=on), optimizer

    def bare(self, model: nn.Module) -> nn.Module:
        """See :meth:`Backend.bare`."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def part(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """See :meth:`Backend.part`."""
        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if last else model.no_sync()


@contextmanager
def join(config: BackendConfig, device: str) -> Iterator[Backend]:
    """The ranks that torchrun (or anything that sets its variables) started."""
    on = find_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Backend(Ranks(on))
        return
    with process_group(on) as ranks:
        yield DDP(ranks)


@contextmanager
def process_group(device: torch.device) -> Iterator[Ranks]:
    """torch.distributed's default group, left at exit."""
    cuda = device.type == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        yield Ranks(device, TorchCollective())
    finally:
        # Without it a gloo process now and then aborts at exit, its work done.
        dist.destroy_process_group()
