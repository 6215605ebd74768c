"""Horovod, started by horovodrun: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from kfac_bench.backends.backend import Backend, find_device
from kfac_bench.config import BackendConfig
from kfac_bench.core.collective import Collective
from kfac_bench.core.horovod import HorovodCollective
from kfac_bench.errors import LostRanksError, UsageError
from kfac_bench.ranks import Ranks


class Horovod(Backend):
    """``hvd.DistributedOptimizer`` averages gradients while backward runs."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._averaging: Any = None  # the optimizer in Horovod's wrapper
        self._plain: Optimizer | None = None  # the one that K-FAC reads learning rates from

    def collective(self) -> Collective:
        """See :meth:`Backend.collective`."""
        return HorovodCollective()

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """See :meth:`Backend.wrap`."""
        hvd, collective = _import(), self.collective()
        everyone = tuple(range(collective.world_size))
        with torch.no_grad():
            for work in [
                collective.broadcast(tensor, 0, everyone, name)
                for name, tensor in model.state_dict().items()
            ]:
                work.wait()
        names = list(model.named_parameters())
        self._averaging = hvd.DistributedOptimizer(optimizer, named_parameters=names)
        self._plain = optimizer
        return model, self._averaging

    def part(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """See :meth:`Backend.part`."""
        # How many backwards from now on a gradient waits for before it is sent.
        self._averaging.set_backward_passes_per_step(1 if last else 2)
        return nullcontext()

    def synchronize(self, optimizer: Optimizer) -> None:
        """See :meth:`Backend.synchronize`."""
        self._averaging.synchronize()

    def step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """See :meth:`Backend.step`."""
        with self._averaging.skip_synchronize():
            scaler.step(optimizer)

    def load(
        self, model: nn.Module, optimizer: Optimizer, shards: Sequence[Mapping[str, Any]]
    ) -> None:
        """See :meth:`Backend.load`."""
        super().load(model, optimizer, shards)
        assert self._plain is not None
        self._plain.param_groups = optimizer.param_groups  # loading has made new ones


@contextmanager
def join(config: BackendConfig, device: str) -> Iterator[Backend]:
    """The ranks that horovodrun started."""
    hvd = _import()
    hvd.init(process_sets="dynamic")  # groups are known when K-FAC has seen the model
    on = find_device(device, hvd.local_rank())
    if hvd.size() == 1:
        yield Backend(Ranks(on))
        return
    if on.type == "cuda" and not hvd.nccl_built():
        raise UsageError(
            "backend=horovod: Horovod was built for CPUs here: HVD_CUDA=1 make install-horovod, "
            "or trainer.device=cpu"
        )
    # Not shut down at exit: Horovod does that itself, and ranks could not meet again (--multirun).
    try:
        yield Horovod(Ranks(on, HorovodCollective()))
    except hvd.HorovodInternalError as error:  # another rank is gone
        raise LostRanksError(str(error).splitlines()[0]) from error


def _import() -> Any:
    try:
        return importlib.import_module("horovod.torch")
    except ModuleNotFoundError:
        raise UsageError(
            "backend=horovod: Horovod is not installed here: make install-horovod"
        ) from None
