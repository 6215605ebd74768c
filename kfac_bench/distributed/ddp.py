"""PyTorch's DistributedDataParallel, started by torchrun or srun: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kfac_bench.config import BackendConfig
from kfac_bench.core.distributed.collective import Collective, TorchCollective
from kfac_bench.distributed.backend import Backend, find_device
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import LostRanksError


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
def launched(
    config: BackendConfig, device: str, make: Callable[[Ranks], Backend]
) -> Iterator[Backend]:
    """``make`` of the ranks that torchrun (or anything that sets its variables) started."""
    on = local_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Backend(Ranks(on))
        return
    with process_group(on, config.timeout_s) as ranks:
        yield make(ranks)


def local_device(device: str) -> torch.device:
    """The one of this rank on its machine."""
    return find_device(device, int(os.environ.get("LOCAL_RANK", "0")))


join = partial(launched, make=DDP)


@contextmanager
def process_group(device: torch.device, timeout_s: float) -> Iterator[Ranks]:
    """torch.distributed's default group, left at exit.

    A message that waits longer than ``timeout_s`` seconds fails. Raises :class:`LostRanksError`
    for that, and where another rank has gone.
    """
    cuda = device.type == "cuda"
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=_of_this_start(store, rank, world_size, timeout_s),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if cuda else None,
        )
        yield Ranks(device, TorchCollective())
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
            line = str(error).splitlines()[0].partition(". This is typically")[0]
            raise LostRanksError(re.sub(r"\[\S*/\S*:\d+\] ", "", line)) from error
        raise
    finally:
        # Without it a gloo process now and then aborts at exit, its work done.
        if dist.is_initialized():
            dist.destroy_process_group()


def _of_this_start(store: Store, rank: int, world_size: int, timeout_s: float) -> PrefixStore:
    """Where the ranks of this start find each other, and nothing of an earlier one.

    torchrun's store outlives a restart, with the addresses of ranks that are gone, and its count
    of restarts differs between nodes. So rank 0 makes up a name, and gives it to each rank that
    says a word which nobody can have said before.
    """
    if rank > 0:
        word = uuid.uuid4().hex
        store.set(f"kfac/word/{rank}", word)
        name = store.get(f"kfac/name/{word}").decode()
        store.set(f"kfac/{name}/{rank}", "here")
        return PrefixStore(name, store)
    name, missing = uuid.uuid4().hex, list(range(1, world_size))
    deadline = time.monotonic() + timeout_s
    while missing:
        if time.monotonic() > deadline:
            raise LostRanksError(f"ranks {missing} did not come within {timeout_s:g} s")
        for other in missing:
            if store.check([f"kfac/word/{other}"]):  # perhaps of an earlier start: then again
                word = store.get(f"kfac/word/{other}").decode()
                store.set(f"kfac/name/{word}", name)
        missing = [r for r in missing if not store.check([f"kfac/{name}/{r}"])]
        time.sleep(0.01)
    return PrefixStore(name, store)
