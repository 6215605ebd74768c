"""What a training run asks of whoever connects its ranks: torch, Horovod, DeepSpeed, ..."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from kfac_bench.core.distributed.collective import Collective, SingleProcess
from kfac_bench.distributed import slurm_rank
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import OneRankError, UsageError


class Backend:
    """How the ranks of a run train one model together; this one: a process alone.

    The order of a run: :meth:`shard`, then the optimizer and K-FAC are made (with a
    :meth:`collective`), then :meth:`wrap`. Of an update: within :meth:`part` forward and
    :meth:`backward`, for each part of the batch; :meth:`synchronize`; K-FAC; :meth:`step`.
    """

    lockstep = False
    """Whether a forward is a message between ranks: all must then run equally many."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def collective(self) -> Collective:
        """A new one for K-FAC's messages."""
        return SingleProcess()

    def shard(self, model: nn.Module) -> nn.Module:
        """Before the optimizer is made: parameters may become parts of themselves."""
        return model

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """What is trained, equal on all ranks: gradients are averaged over them from here on."""
        return model, optimizer

    def bare(self, model: nn.Module) -> nn.Module:
        """The model without its wrapper: checkpoints and evaluation know nothing of it."""
        return model

    def part(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one part of the batch; ranks meet at the last one."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Of one part's loss, scaled."""
        loss.backward()  # type: ignore[no-untyped-call]

    def synchronize(self, optimizer: Optimizer) -> None:
        """When this returns, gradients are averaged over ranks."""

    def step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Update the weights by the gradients as they are now."""
        scaler.step(optimizer)

    def state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """What this rank adds to a checkpoint; all ranks call it.

        On rank 0 ``model`` and ``optimizer``, whole, as one process would save them.
        """
        if not self.ranks.is_main:
            return {}
        return {"model": self.bare(model).state_dict(), "optimizer": optimizer.state_dict()}

    def load(
        self, model: nn.Module, optimizer: Optimizer, shards: Sequence[Mapping[str, Any]]
    ) -> None:
        """Take over what :meth:`state` gave, on any number of ranks and of any backend.

        Raises ``RuntimeError`` for another model, ``ValueError`` for another optimizer.
        """
        self.bare(model).load_state_dict(shards[0]["model"])
        optimizer.load_state_dict(shards[0]["optimizer"])


def find_device(name: str, local_rank: int) -> torch.device:
    """``auto``, ``cpu`` or ``cuda`` as a device of this process."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("trainer.device=cuda: torch sees no GPU here; use trainer.device=cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and slurm_rank.has_its_own_gpus(count):
        local_rank = 0
    if local_rank >= count:
        raise OneRankError(
            f"no GPU is left for local rank {local_rank}: start at most "
            f"{count} ranks on this node, or set trainer.device=cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
