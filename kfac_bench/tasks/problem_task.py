"""The task of a user's own problem: its loss and metric, which are tried before a run begins."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfac_bench import randomness
from kfac_bench.config.problem_file import ProblemFile
from kfac_bench.data.base.batch import Batch, size, to_device
from kfac_bench.data.problem_data import TRIED, ProblemData
from kfac_bench.errors import UsageError
from kfac_bench.tasks.task import Prediction, SummedTask


class ProblemTask(SummedTask):
    """The loss and the metric of a problem; see :class:`kfac_bench.Problem`.

    Args:
        file: The file of the problem.
        has_parts: Whether a batch is a tuple for the user's functions; otherwise they get its only
            part.
    """

    def __init__(self, file: ProblemFile, has_parts: bool) -> None:
        problem = file.problem
        self.file, self._problem, self._has_parts = file, problem, has_parts
        self._takes_model = problem.loss_takes_model
        self.metric = problem.metric_title
        self.higher_is_better = problem.higher_is_better
        self.likelihood = problem.likelihood or "none"
        self.curvature = problem.curvature
        self.num_totals = 2

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of the problem, and the output (or the loss, if there is no output)."""
        if self._takes_model:
            made = self._problem.loss(model, self._own(batch))
            loss, output = made if isinstance(made, tuple) else (made, made)
            return loss, output
        if len(batch) < 2:
            raise UsageError(
                f"{self.file.path}: loss(output, target) needs a batch of inputs and targets. "
                "For other batches write a function loss(model, batch), whose first parameter is "
                "called `model`"
            )
        *inputs, target = batch
        output = model(*inputs)
        loss = self._problem.loss(output, target)
        if self.likelihood == "categorical" and output.ndim > 2:
            # torch's cross entropy has the classes in dimension 1, K-FAC in the last one.
            output = output.movedim(1, -1)
        return loss, output

    @torch.no_grad()
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return [examples, sum of the metric over the examples], float64."""
        examples = size(batch)
        value = torch.as_tensor(self._problem.metric(model, self._own(batch))).detach().double()
        if value.numel() not in (1, examples) or value.ndim > 1:
            raise UsageError(
                f"{self.file.path}: the metric has the shape {list(value.shape)} for a batch of "
                f"{examples} examples. Return the mean over the batch, or one number per example"
            )
        total = value.mean() * examples
        return torch.stack([torch.full_like(total, examples), total])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return the metric, averaged over all examples that the totals count."""
        examples, total = totals.tolist()
        return {self.metric: total / examples}

    def show(self, model: nn.Module, batch: Batch, count: int) -> list[Prediction]:
        """Return nothing: a problem does not say how its examples look."""
        return []

    def _own(self, batch: Batch) -> Any:
        return batch if self._has_parts else batch[0]


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
    _check_mean(path, "loss", value, doubled.item())


def _check_mean(path: str, what: str, value: float, twice: float) -> None:
    """Refuse a sum: of examples that occur twice it is twice as large, and their mean the same."""
    if abs(value) > 1e-6 and abs(twice / value - 2) < 0.01:
        raise UsageError(
            f"{path}: the {what} is a sum over the examples: it is {value:.4g} for one batch and "
            f"{twice:.4g} for the same batch twice. Return the mean over the examples"
        )


def _try_metric(task: ProblemTask, model: nn.Module, data: ProblemData, device: Any) -> None:
    file = data.file
    values = []
    for copies in (1, 2):
        batch = _batch(data, "validation", device, copies)
        totals = file.call(
            "the metric fails on the first batch", partial(task.totals, model, batch)
        )
        values.append(task.metrics(totals)[task.metric])
    if math.isnan(values[0]):
        raise UsageError(f"{file.path}: the metric `{task.metric}` of the first batch is NaN")
    _check_mean(file.path, f"metric `{task.metric}`", *values)


def _batch(data: ProblemData, name: str, device: Any, copies: int = 1) -> Batch:
    whole = data.first(name, TRIED, copies)
    return to_device(whole if isinstance(whole, tuple) else (whole,), device)
