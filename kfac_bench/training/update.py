"""One update of the weights: the whole algorithm, in a precision, a batch at once or in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from kfac_bench.config import TrainerConfig
from kfac_bench.core import KFAC
from kfac_bench.data.base.batch import Batch, size, split
from kfac_bench.distributed.backend import Backend
from kfac_bench.errors import UsageError
from kfac_bench.tasks.task import Task

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What autocast computes in, by ``trainer.precision``."""


def least_part(train_size: int, config: TrainerConfig, world_size: int) -> int:
    """Examples in the smallest part of a batch that goes through the model at once."""
    batch_size, rest = config.batch_size, train_size % config.batch_size
    least = rest if rest and not config.drop_last else batch_size
    return max(1, least // world_size // config.accumulate)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a training step needs two examples at a time: one has no variance."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


class Update:
    """Forward, backward, K-FAC and optimizer: :meth:`backward`, then :meth:`step`.

    Weights, their gradients and K-FAC stay in float32 whatever the precision. fp16 multiplies the
    loss by ``scaler``'s scale; an update whose gradients overflow is left out, the scale halved.
    ``stand_in`` gives a batch of one example, for a rank that has none.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        kfac: KFAC | None,
        config: TrainerConfig,
        backend: Backend,
        stand_in: Callable[[], Batch],
    ) -> None:
        self._task, self._model, self._optimizer, self._kfac = task, model, optimizer, kfac
        ranks, self._backend, self._stand_in = backend.ranks, backend, stand_in
        self._world_size, self._batch_size = ranks.world_size, config.batch_size
        self._weight = 1.0  # of this rank's mean loss in that of the last batch
        self._device, self._dtype = ranks.device, DTYPES[config.precision]
        self.scaler = GradScaler(self._device.type, enabled=config.precision == "fp16")
        self._parts_of_batch = config.accumulate
        if config.accumulate > max(1, config.batch_size // ranks.world_size):
            raise UsageError(
                f"trainer.accumulate={config.accumulate} is more than the "
                f"{config.batch_size // ranks.world_size} examples of a rank: "
                f"trainer.batch_size={config.batch_size} over {ranks.world_size} ranks"
            )

    def backward(self, batch: Batch, examples: int | None = None) -> Tensor:
        """Set the gradients, averaged over ranks; this rank's share of the mean loss, unscaled.

        ``batch`` is this rank's, perhaps empty, of so many ``examples`` over all ranks (None:
        trainer.batch_size); the mean of the shares over ranks is the mean over the examples. Parts
        of a batch are weighted by their sizes, so all is as if the batch had gone through one
        process at once (but for batch norm, which sees the parts). Ranks meet at the last part.
        """
        self._weight = size(batch) * self._world_size / (examples or self._batch_size)
        if self._kfac is not None:
            self._kfac.loss_weight = self._weight
        self._optimizer.zero_grad()
        total = torch.zeros((), device=self._device)
        for i, (part, share) in enumerate(self._parts(batch)):
            last = i == self._parts_of_batch - 1
            with self._backend.part(self._model, last=last), self._accumulating(not last):
                with self._autocast():
                    loss, output = self._forward(self._model, part, share)
                if self._kfac is not None:
                    curvature = getattr(self._task, "curvature", 1.0)
                    self._kfac.fisher_backward(output, self._task.likelihood, curvature=curvature)
                loss = loss * share
                self._backend.backward(self.scaler.scale(loss))
                total += loss.detach()
                del output  # logits of a vocabulary weigh: not beside those of the next part
        self._backend.synchronize(self._optimizer)
        return total

    def step(self, batch: Batch, loss: Tensor) -> None:
        """K-FAC and the optimizer; ``batch`` and ``loss`` are those of :meth:`backward`."""
        adapts = self._kfac is not None and self._kfac.will_adapt_damping
        scale = self.scaler.get_scale() if adapts else 0.0
        self.scaler.unscale_(self._optimizer)
        if self._kfac is not None:
            self._kfac.step(self.scaler.get_scale)
        self._backend.step(self._optimizer, self.scaler)
        self.scaler.update()
        if adapts and self.scaler.get_scale() >= scale:  # else the update was left out
            assert self._kfac is not None
            self._kfac.adapt_damping(loss, lambda: self._loss(batch))

    def decomposes_all(self) -> bool:
        """Whether the next one decomposes all factors at once; equal on all ranks."""
        return self._kfac is not None and self._kfac.will_decompose_all

    def _parts(self, batch: Batch) -> Iterator[tuple[Batch, float]]:
        """Parts whose sizes differ by one at most, and their weights; 0 for one without examples.

        There is a stand-in for it: all ranks run equally many forwards.
        """
        for part in split(batch, self._parts_of_batch):
            if share := size(part) / max(1, size(batch)):
                yield part, share * self._weight
            else:
                yield self._stand_in(), 0.0

    def _forward(self, model: nn.Module, part: Batch, share: float) -> tuple[Tensor, Tensor]:
        """The task's; batch norm and K-FAC must not see a stand-in, and look away in eval mode."""
        if share:
            return self._task.forward(model, part)
        bare = self._backend.bare(model)
        bare.eval()
        try:
            return self._task.forward(model, part)
        finally:
            bare.train()

    def _accumulating(self, more: bool) -> AbstractContextManager[None]:
        """K-FAC's own note that more parts will come."""
        return self._kfac.accumulate() if more and self._kfac is not None else nullcontext()

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self._device.type, self._dtype, enabled=self._dtype is not None)

    def _loss(self, batch: Batch) -> Tensor:
        """Of this rank, with the weights of now; running averages stay as they are."""
        bare = self._backend.bare(self._model)
        kept = [(buffer, buffer.clone()) for buffer in bare.buffers()]
        total = torch.zeros((), device=self._device)
        for part, share in self._parts(batch):
            with self._autocast():
                total += self._forward(bare, part, share)[0] * share
        for buffer, before in kept:
            buffer.copy_(before)
        return total
