"""The options of the training loop that change the model, without another name of a weight.

:mod:`kfac_bench.training.run` calls these functions while it builds a run. The options are
``trainer.sync_batch_norm``, ``trainer.ema``, ``trainer.checkpoint_activations`` and
``trainer.compile``. :mod:`kfac_bench.training.trainer` updates the average after each step and
evaluates it.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from kfac_bench.config import TrainConfig
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import UsageError, first_line


def synchronize_batch_norm(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Return the model with batch norm over the examples of all ranks.

    Raises:
        UsageError: The ranks have no GPUs, which torch's SyncBatchNorm needs.
    """
    if ranks.device.type != "cuda":
        raise UsageError(
            f"trainer.sync_batch_norm=true does not fit the device {ranks.device.type}: torch's "
            "SyncBatchNorm needs GPUs. Set trainer.sync_batch_norm=false"
        )
    synchronized: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return synchronized


def before_hooks(model: nn.Module, config: TrainConfig) -> AveragedModel | None:
    """Change a model that has no hooks yet, and return its moving average, if the run has one."""
    decay = config.trainer.ema
    average = None if decay is None else average_of(model, decay)
    if config.trainer.checkpoint_activations:
        checkpoint_blocks(model, config.model.name)
    return average


def average_of(model: nn.Module, decay: float) -> AveragedModel:
    """Return a moving average that begins as a copy of the model.

    Numbers of buffers, such as the running averages of batch norm, are averaged too. Integer
    buffers, such as counts and positions, are copied.

    Args:
        model: The model, without hooks and wrappers: they would be copied too.
        decay: Weight of the old average in each update.
    """
    average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def update(averaged: Sequence[Tensor], current: Sequence[Tensor], count: Any) -> None:
        if averaged[0].is_floating_point():
            average(averaged, current, count)
        else:
            # An average of integers would round down.
            for old, new in zip(averaged, current, strict=True):
                old.copy_(new)

    averaged = AveragedModel(model, multi_avg_fn=update, use_buffers=True)
    return averaged.eval()


def checkpoint_blocks(model: nn.Module, name: str) -> None:
    """Let each block keep only its inputs, and compute its activations again in backward.

    Args:
        model: The model, which is changed in place.
        name: The option ``model.name``, for the error message.

    Raises:
        UsageError: The model has no list of blocks.
    """
    found = list(_blocks(model))
    if not found:
        raise UsageError(
            f"trainer.checkpoint_activations=true has no effect on model={name}, which has no list "
            "of blocks: set trainer.checkpoint_activations=false"
        )
    for block in found:
        norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            # The contexts of the first forward and of each later one.
            context_fn=partial(_contexts, norms),
        )


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of lists of modules, such as the layers of a transformer.

    A member without modules of its own, such as a linear layer, keeps little more than its input.
    """
    is_list = isinstance(model, nn.Sequential | nn.ModuleList)
    for child in model.children():
        if is_list and any(True for _ in child.children()) and not isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _blocks(child)


def _contexts(
    norms: Sequence[_BatchNorm],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _NoRunningAverages(norms)


class _NoRunningAverages(AbstractContextManager[None]):
    """Batch norm normalizes as in training, but does not count the batch a second time.

    Several backward passes through one forward, as of ``kfac.fisher``, enter the context each.
    """

    def __init__(self, norms: Sequence[_BatchNorm]) -> None:
        self._norms = norms
        self._before: list[tuple[float | None, Tensor | None]] = []

    def __enter__(self) -> None:
        self._before = [(norm.momentum, norm.num_batches_tracked) for norm in self._norms]
        for norm in self._norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None

    def __exit__(self, *error: object) -> None:
        for norm, before in zip(self._norms, self._before, strict=True):
            norm.momentum, norm.num_batches_tracked = before


def compile_models(models: Sequence[nn.Module], device: torch.device) -> None:
    """Let each model be compiled in place, when it is first called with inputs of a shape.

    Raises:
        UsageError: torch.compile does not work here. A compiler for C++ may be missing, for
            example.
    """
    # A small module tells at once. A model with K-FAC runs without its graph at first.
    probe = nn.Tanh()
    # By default torch compiles for any size when it meets a second size. A resumed run would meet
    # the sizes in another order, and other graphs give other bits.
    for model in (probe, *models):
        model.compile(dynamic=False)
    try:
        probe(torch.zeros(2, device=device))
    except TorchDynamoException as error:
        raise UsageError(str(compile_problem(error))) from None


def compile_problem(error: BaseException) -> str | None:
    """Return the line about a model that torch.compile cannot compile; None for other errors."""
    if not isinstance(error, TorchDynamoException):
        return None
    reason = getattr(error, "inner_exception", error)
    return (
        "trainer.compile=true: torch.compile cannot compile the model here "
        f"({first_line(reason)[:200]}). Set trainer.compile=false"
    )
