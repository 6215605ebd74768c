"""The interface of a task: a loss to minimize, validation metrics, and predictions to look at.

The trainer calls a :class:`Task`. Metrics are exact on any number of ranks, because they are
computed from sums over the whole evaluation set.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from kfac_bench.data.base.batch import Batch
from kfac_bench.distributed.ranks import Ranks

Picture = np.ndarray[Any, np.dtype[np.uint8]]
"""An RGB picture, uint8 [H, W, 3]."""


@dataclass(frozen=True)
class Prediction:
    """One example: a caption of one line, a picture, and a text of any number of lines.

    Boxes and masks are drawn into the picture. `text` is for examples that are text (question,
    true answer, predicted answer). The picture or the text may be missing.
    """

    caption: str
    image: Picture | None = None
    text: str | None = None


class Evaluation(Protocol):
    """One pass over the evaluation set, of which each rank sees a part."""

    def add(self, model: nn.Module, batch: Batch) -> None:
        """Evaluate a batch of this rank. The model is in evaluation mode, no gradient is recorded.

        No rank waits for another: ranks may have different numbers of batches, also none.
        """
        ...

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Return the metrics over the examples of all ranks; all ranks call it and get the same."""
        ...


class Task(Protocol):
    """A training objective and exact validation metrics.

    `metric` names the metric that `trainer.target` refers to, and `higher_is_better` its direction.

    `likelihood` is the distribution that the model's output stands for, by the names of
    `KFAC.fisher_backward`. A Fisher other than the empirical one is an expectation over labels
    drawn from this distribution. A task whose likelihood has a curvature other than 1 also has an
    attribute `curvature`.
    """

    metric: str
    higher_is_better: bool
    likelihood: str

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the differentiable training loss, a scalar, and the output it was made from.

        The loss must be the MEAN over the examples: K-FAC undoes the factor 1/n, so that G does not
        depend on the batch size. The loss is the negative log likelihood, with the scale that
        `KFAC.fisher_backward` documents, up to terms that are linear in the output (such as label
        smoothing).
        """
        ...

    def evaluation(self) -> Evaluation:
        """Start a pass over the evaluation set."""
        ...

    def show(self, model: nn.Module, batch: Batch, count: int) -> list[Prediction]:
        """Return at most `count` examples of an evaluation batch, for people to look at.

        The worst examples come first, unless finding them costs too much, because errors tell more
        than successes. The model is in evaluation mode, no gradient is recorded. If a forward pass
        sends messages, all ranks call this method in the same way.
        """
        ...


def reached(task: Task, value: float, target: float) -> bool:
    """Return whether `value` of the task's metric is at least as good as `target`; NaN never is."""
    return value >= target if task.higher_is_better else value <= target


class SummedTask:
    """The base of tasks whose metrics follow from sums over the examples."""

    num_totals: int

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return sums over the examples, float64 [num_totals], the first the number of examples.

        Totals add up over batches and ranks. A mean of means over unequal batches would be wrong.
        """
        raise NotImplementedError

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return the metrics of the whole evaluation set from its summed totals."""
        raise NotImplementedError

    def evaluation(self) -> Evaluation:
        """Start a pass that adds up totals."""
        return _SummedEvaluation(self)


class _SummedEvaluation:
    """A pass over the evaluation set that adds up the totals of its task."""

    def __init__(self, task: SummedTask) -> None:
        self._task = task
        self._totals = torch.zeros(task.num_totals, dtype=torch.float64)

    def add(self, model: nn.Module, batch: Batch) -> None:
        new = self._task.totals(model, batch)
        self._totals = self._totals.to(new.device) + new

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        return self._task.metrics(ranks.sum(self._totals.to(ranks.device)).cpu())
