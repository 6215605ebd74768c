"""One batch of a user's problem is tried before anything long begins."""

import math
from typing import Any

from torch import Tensor, nn

from kfac_bench import randomness
from kfac_bench.data.base.batch import Batch, to_device
from kfac_bench.data.own.problem_data import TRIED, ProblemData
from kfac_bench.errors import UsageError
from kfac_bench.tasks.objectives.problem_task import ProblemTask


def try_out(model: nn.Module, data: ProblemData) -> None:
    """Compute the loss and the metric of a few examples. The model keeps its state.

    Raises:
        UsageError: The model, the loss or the metric fails, or has a value that cannot work.
    """
    task, was_training = ProblemTask(data.file, data.has_parts), model.training
    device = next(model.parameters()).device
    # In evaluation mode batch norm keeps its averages.
    model.eval()
    try:
        with randomness.preserve_rng():
            _try_loss(task, model, data, device)
            _try_metric(task, model, data, device)
    finally:
        model.train(was_training)


def _try_loss(task: ProblemTask, model: nn.Module, data: ProblemData, device: Any) -> None:
    file, path = data.file, data.file.path
    try:
        loss, output = file.call(
            "the model or the loss fails on the first batch",
            lambda: task.forward(model, _batch(data, "train", device)),
        )
    except UsageError as error:
        if (name := file.problem.name_of_model(str(error))) is None:
            raise
        raise UsageError(
            f"{error}. loss({name}, ...) got the output of the model. If it needs the model, "
            f"rename the parameter `{name}` to `model`"
        ) from None
    if not isinstance(loss, Tensor) or loss.ndim:
        shape = f" of shape {list(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise UsageError(
            f"{path}: the loss is an object of class {type(loss).__name__}{shape}. Return a scalar "
            "tensor: the mean over the examples"
        )
    value = loss.item()
    if not math.isfinite(value):
        raise UsageError(f"{path}: the loss of the first batch is {value}. It must be finite")
    if not loss.requires_grad:
        raise UsageError(
            f"{path}: the loss does not depend on the parameters of the model. Do not detach the "
            "output, and use no torch.no_grad()"
        )
    if task.likelihood != "none" and (not isinstance(output, Tensor) or not output.ndim):
        raise UsageError(
            f"{path}: likelihood={task.likelihood} needs the output of the model. Return a pair "
            "(loss, output) from loss(model, batch)"
        )
    doubled, _ = file.call(
        "the model or the loss fails on a batch of twice as many examples",
        lambda: task.forward(model, _batch(data, "train", device, copies=2)),
    )
    twice = doubled.item()
    # The mean over examples that occur twice is the same; their sum is twice as large.
    if abs(value) > 1e-6 and abs(twice / value - 2) < 0.01:
        raise UsageError(
            f"{path}: the loss is a sum over the examples: it is {value:.4g} for one batch and "
            f"{twice:.4g} for the same batch twice. Return the mean over the examples"
        )


def _try_metric(task: ProblemTask, model: nn.Module, data: ProblemData, device: Any) -> None:
    file = data.file
    totals = file.call(
        "the metric fails on the first batch",
        lambda: task.totals(model, _batch(data, "validation", device)),
    )
    value = task.metrics(totals)[task.metric]
    if math.isnan(value):
        raise UsageError(f"{file.path}: the metric `{task.metric}` of the first batch is NaN")


def _batch(data: ProblemData, name: str, device: Any, copies: int = 1) -> Batch:
    whole = data.first(name, TRIED, copies)
    return to_device(whole if isinstance(whole, tuple) else (whole,), device)
