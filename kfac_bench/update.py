"""One update of the weights: the whole algorithm, in a precision, a batch at once or in parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from kfac_bench.backends.backend import Backend
from kfac_bench.config import TrainerConfig
from kfac_bench.core import KFAC
from kfac_bench.core.damping import LevenbergMarquardt
from kfac_bench.data.data import Batch
from kfac_bench.errors import UsageError
from kfac_bench.tasks.task import Task

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What autocast computes in, by ``trainer.precision``."""


class Update:
    """Forward, backward, K-FAC and optimizer: :meth:`backward`, then :meth:`step`.

    Weights, their gradients and K-FAC stay in float32 whatever the precision. fp16 multiplies the
    loss by ``scaler``'s scale; an update whose gradients overflow is left out, the scale halved.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        kfac: KFAC | None,
        config: TrainerConfig,
        backend: Backend,
    ) -> None:
        self._task, self._model, self._optimizer, self._kfac = task, model, optimizer, kfac
        ranks, self._backend = backend.ranks, backend
        self._device, self._dtype = ranks.device.type, DTYPES[config.precision]
        self.scaler = GradScaler(self._device, enabled=config.precision == "fp16")
        self._parts_of_batch = config.accumulate
        if config.accumulate > config.batch_size // ranks.world_size:
            raise UsageError(
                f"trainer.accumulate={config.accumulate} is more than the "
                f"{config.batch_size // ranks.world_size} examples of a rank: "
                f"trainer.batch_size={config.batch_size} over {ranks.world_size} ranks"
            )

    def backward(self, batch: Batch) -> Tensor:
        """Set the gradients, averaged over ranks; this rank's mean loss, unscaled.

        Parts are weighted by their sizes, so all is as if the batch had gone through at once
        (but for batch norm, which sees the parts). Ranks meet at the last one only.
        """
        self._optimizer.zero_grad()
        total = torch.zeros((), device=batch[0].device)
        for i, (part, share) in enumerate(self._parts(batch)):
            with self._backend.part(self._model, last=i == self._parts_of_batch - 1):
                with self._autocast():
                    loss, output = self._task.forward(self._model, part)
                if self._kfac is not None:
                    self._kfac.fisher_backward(output, self._task.likelihood)
                loss = loss * share
                self._backend.backward(self.scaler.scale(loss))
                total += loss.detach()
        self._backend.synchronize(self._optimizer)
        return total

    def step(self, batch: Batch, loss: Tensor) -> None:
        """K-FAC and the optimizer; ``batch`` and ``loss`` are those of :meth:`backward`."""
        adapts = self._adapts_damping()
        scale = self.scaler.get_scale() if adapts else 0.0
        self.scaler.unscale_(self._optimizer)
        if self._kfac is not None:
            self._kfac.step(self.scaler.get_scale)
        self._backend.step(self._optimizer, self.scaler)
        self.scaler.update()
        if adapts and self.scaler.get_scale() >= scale:  # else the update was left out
            assert self._kfac is not None
            self._kfac.adapt_damping(loss, lambda: self._loss(batch))

    def _adapts_damping(self) -> bool:
        """Whether the damping wants to know what this update brings."""
        damping = None if self._kfac is None else self._kfac.schedules.damping
        if self._kfac is None or not isinstance(damping, LevenbergMarquardt):
            return False
        return damping.is_due(self._kfac.steps)

    def _parts(self, batch: Batch) -> Iterator[tuple[Batch, float]]:
        """Parts whose sizes differ by one at most, and their shares of the batch."""
        split = (torch.tensor_split(x, self._parts_of_batch) for x in batch)
        for images, labels in zip(*split, strict=True):
            yield (images, labels), len(images) / len(batch[0])

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self._device, self._dtype, enabled=self._dtype is not None)

    def _loss(self, batch: Batch) -> Tensor:
        """Of this rank, with the weights of now; running averages stay as they are."""
        bare = self._backend.bare(self._model)
        kept = [(buffer, buffer.clone()) for buffer in bare.buffers()]
        total = torch.zeros((), device=batch[0].device)
        for part, share in self._parts(batch):
            with self._autocast():
                total += self._task.forward(bare, part)[0] * share
        for buffer, before in kept:
            buffer.copy_(before)
        return total
