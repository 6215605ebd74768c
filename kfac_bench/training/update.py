"""One update of the weights: forward, backward, K-FAC and optimizer, in any precision.

:class:`Trainer` calls :meth:`Update.backward` and then :meth:`Update.step`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from kfac_bench.config import TrainerConfig
from kfac_bench.core import KFAC
from kfac_bench.core.planning.budget import BudgetError
from kfac_bench.data.base.batch import Batch, size, split
from kfac_bench.distributed.backend import Backend
from kfac_bench.errors import UsageError
from kfac_bench.output import counted
from kfac_bench.tasks.task import Task

AUTOCAST_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of autocast, by ``trainer.precision``; None for no autocast."""


def least_part(train_size: int, config: TrainerConfig, world_size: int) -> int:
    """Return the examples in the smallest part of a batch that passes the model at once."""
    batch_size, rest = config.batch_size, train_size % config.batch_size
    least = rest if rest and not config.drop_last else batch_size
    return max(1, least // world_size // config.accumulate)


def check_parts(config: TrainerConfig, world_size: int) -> None:
    """Raise :class:`UsageError` if a rank has no example, or fewer than parts of a batch."""
    examples = config.batch_size // world_size
    if not examples:
        raise UsageError(
            f"trainer.batch_size={config.batch_size} leaves some of {world_size} ranks without an "
            "example: it is the batch of all ranks"
        )
    if config.accumulate > examples:
        raise UsageError(
            f"trainer.accumulate={config.accumulate} is more than the {examples} examples of a "
            f"rank: trainer.batch_size={config.batch_size} over {world_size} ranks"
        )


def check_last_batch(train_size: int, config: TrainerConfig, world_size: int) -> None:
    """Raise :class:`UsageError` if a rank without an example would let synchronized ranks wait.

    A part without examples runs in eval mode, in which SyncBatchNorm sends nothing.
    """
    rest = 0 if config.drop_last else train_size % config.batch_size
    if config.sync_batch_norm and 0 < rest < world_size * config.accumulate:
        raise UsageError(
            f"trainer.sync_batch_norm=true: the last batch has only {counted(rest, 'example')} for "
            f"{world_size} ranks with trainer.accumulate={config.accumulate}. Set "
            "trainer.drop_last=true"
        )


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether each rank needs two examples at a time: one example has no variance.

    Synchronized batch norm uses the examples of all ranks.
    """
    kind = nn.modules.batchnorm._BatchNorm
    return any(isinstance(m, kind) and not isinstance(m, nn.SyncBatchNorm) for m in model.modules())


class Update:
    """Forward, backward, K-FAC and optimizer of one run.

    Weights, gradients and K-FAC stay in float32 in every precision. With fp16 the loss is
    multiplied by the scale of ``scaler``. If gradients overflow, the update is skipped and the
    scale is halved.

    Args:
        task: Computes the loss.
        model: The model in the wrapper of the backend.
        optimizer: The optimizer.
        kfac: The preconditioner, or None.
        config: The options ``trainer.*``.
        backend: Connects the ranks.
        stand_in: Returns a batch of one example, for a rank that has no examples.
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
        # The share of this rank's mean loss in the mean loss over all ranks, for the last batch.
        self._weight = 1.0
        self._device, self._dtype = ranks.device, AUTOCAST_DTYPES[config.precision]
        self.scaler = GradScaler(self._device.type, enabled=config.precision == "fp16")
        self._max_norm, self._clip_when = config.clip_grad_norm, config.clip_grad_when
        self._parts_of_batch = config.accumulate

    def backward(self, batch: Batch, examples: int | None = None) -> Tensor:
        """Set the gradients, averaged over ranks, and return this rank's share of the mean loss.

        The mean of the shares over ranks is the mean loss over all examples. Parts of a batch are
        weighted by their sizes. So the result is as if the whole batch passed one process at once,
        except for batch norm, which sees the parts. Ranks communicate at the last part.

        Args:
            batch: The batch of this rank; it may be empty.
            examples: Examples of all ranks together. None: ``trainer.batch_size``.
        """
        self._weight = size(batch) * self._world_size / (examples or self._batch_size)
        if self._kfac is not None:
            self._kfac.loss_weight = self._weight
        self._optimizer.zero_grad()
        total = torch.zeros((), device=self._device)
        for i, (part, share) in enumerate(self._parts(batch)):
            # Gradients are averaged over ranks once, with the last part.
            last = i == self._parts_of_batch - 1
            with self._backend.part(self._model, last=last), self._accumulating(not last):
                with self._autocast():
                    loss, output = self._forward(self._model, part, share)
                if self._kfac is not None:
                    curvature = getattr(self._task, "curvature", 1.0)
                    likelihood = self._task.likelihood
                    self._kfac.fisher_backward(output, likelihood, dim=-1, curvature=curvature)
                loss = loss * share
                self._backend.backward(self.scaler.scale(loss))
                total += loss.detach()
                # Logits of a vocabulary are large: free them before those of the next part.
                del output
        self._backend.synchronize(self._optimizer)
        return total

    def step(self, batch: Batch, loss: Tensor) -> None:
        """Precondition and update the weights, with ``batch`` and ``loss`` of :meth:`backward`.

        Raises:
            UsageError: ``kfac.max_overhead`` cannot be met.
        """
        adapts = self._kfac is not None and self._kfac.will_adapt_damping
        scale = self.scaler.get_scale() if adapts else 0.0
        self.scaler.unscale_(self._optimizer)
        self._clip("before")
        if self._kfac is not None:
            try:
                self._kfac.step(self._loss_scale if self.scaler.is_enabled() else 1.0)
            except BudgetError as error:
                raise UsageError(f"kfac: {error}") from None
        self._clip("after")
        self._backend.step(self._optimizer, self.scaler)
        self.scaler.update()
        # A smaller scale means that the scaler skipped the update: there is nothing to judge then.
        if adapts and self.scaler.get_scale() >= scale:
            assert self._kfac is not None
            self._kfac.adapt_damping(loss, lambda: self._loss(batch))

    def _clip(self, when: str) -> None:
        """Limit the norm of the whole gradient, if ``when`` is the place for it."""
        if self._max_norm is not None and self._clip_when == when:
            groups = self._optimizer.param_groups
            nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], self._max_norm)

    def _loss_scale(self) -> Tensor:
        """Return the loss scale as a tensor: the number would have to be read from the device."""
        return self.scaler.scale(torch.ones((), device=self._device))

    def _parts(self, batch: Batch) -> Iterator[tuple[Batch, float]]:
        """Yield the parts of a batch and their weights. Sizes differ by one at most.

        A part without examples becomes the stand-in with weight 0, because all ranks must run
        equally many forwards.
        """
        for part in split(batch, self._parts_of_batch):
            if share := size(part) / max(1, size(batch)):
                yield part, share * self._weight
            else:
                yield self._stand_in(), 0.0

    def _forward(self, model: nn.Module, part: Batch, share: float) -> tuple[Tensor, Tensor]:
        """Return loss and output of the task."""
        if share:
            return self._task.forward(model, part)
        # A stand-in must not count. In eval mode neither batch norm nor K-FAC sees it.
        bare = self._backend.bare(model)
        bare.eval()
        try:
            return self._task.forward(model, part)
        finally:
            bare.train()

    def _accumulating(self, more: bool) -> AbstractContextManager[None]:
        """Tell K-FAC that more parts will follow."""
        return self._kfac.accumulate() if more and self._kfac is not None else nullcontext()

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self._device.type, self._dtype, enabled=self._dtype is not None)

    def _loss(self, batch: Batch) -> Tensor:
        """Return the loss of this rank with the current weights; buffers keep their values."""
        bare = self._backend.bare(self._model)
        # A forward in training mode moves the running averages of batch norm.
        kept = [(buffer, buffer.clone()) for buffer in bare.buffers()]
        total = torch.zeros((), device=self._device)
        for part, share in self._parts(batch):
            with self._autocast():
                total += self._forward(bare, part, share)[0] * share
        for buffer, before in kept:
            buffer.copy_(before)
        return total
