"""The loss and the metric of a user's problem, as a task."""

from typing import Any

import torch
from torch import Tensor, nn

from kfac_bench.config.problem_file import ProblemFile
from kfac_bench.data.base.batch import Batch, size
from kfac_bench.errors import UsageError
from kfac_bench.tasks.evaluation import SummedTask
from kfac_bench.tasks.prediction import Prediction


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
