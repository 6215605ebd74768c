"""The backend: what a training run asks of the library that connects its ranks.

This file has the backend of a single process. The trainer calls the methods; DDP, FSDP2, Horovod
and DeepSpeed override them.
"""

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
    """The way in which the ranks of a run train one model. This class serves a single process.

    A run calls `shard`, makes the optimizer and K-FAC (with a `collective`), and calls `wrap`. An
    update runs forward and `backward` within `part`, once for each part of the batch. Then it calls
    `synchronize`, steps K-FAC, and calls `step`.
    """

    lockstep = False
    """True if a forward pass sends messages. All ranks must then run equally many passes."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def collective(self) -> Collective:
        """Return a new collective for K-FAC's messages."""
        return SingleProcess()

    def shard(self, model: nn.Module) -> nn.Module:
        """Return the model with its parameters split over ranks, if the backend splits them."""
        return model

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Return model and optimizer for training.

        All ranks start with equal weights. From now on the backend averages gradients over ranks.
        """
        return model, optimizer

    def bare(self, model: nn.Module) -> nn.Module:
        """Return the model without its wrapper, for checkpoints and evaluation."""
        return model

    def part(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Return the context for forward and backward of one part of the batch.

        Only in the last part do the ranks average gradients.
        """
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run backward for the scaled loss of one part."""
        loss.backward()  # type: ignore[no-untyped-call]

    def synchronize(self, optimizer: Optimizer) -> None:
        """Wait until the gradients are averaged over ranks."""

    def step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Update the weights with the present gradients."""
        scaler.step(optimizer)

    def state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return this rank's part of a checkpoint. All ranks call this method together.

        On rank 0 this is `model` and `optimizer`, complete, as a single process would save them. On
        other ranks it is empty.
        """
        if not self.ranks.is_main:
            return {}
        return {"model": self.bare(model).state_dict(), "optimizer": optimizer.state_dict()}

    def load(
        self, model: nn.Module, optimizer: Optimizer, shards: Sequence[Mapping[str, Any]]
    ) -> None:
        """Load what `state` returned, with any backend on any number of ranks.

        Raises:
            RuntimeError: If the state belongs to another model.
            ValueError: If the state belongs to another optimizer.
        """
        self.bare(model).load_state_dict(shards[0]["model"])
        optimizer.load_state_dict(shards[0]["optimizer"])


def refuse_scalars(model: nn.Module, backend: str) -> None:
    """Raise :class:`UsageError` if a parameter has no dimension: such a backend divides tensors."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise UsageError(
                f"backend={backend} cannot divide the parameter {name}, which has no dimension. "
                "Make it a tensor of one element, or use backend=ddp"
            )


def find_device(name: str, local_rank: int) -> torch.device:
    """Return this process's device.

    Args:
        name: The option trainer.device: `auto`, `cpu` or `cuda`.
        local_rank: The number of this rank on its node, which is the number of its GPU.

    Raises:
        UsageError: If this process has no GPU but needs one.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("trainer.device=cuda: torch sees no GPU here; use trainer.device=cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # Slurm may show each task its own GPU only, always under the number 0.
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
