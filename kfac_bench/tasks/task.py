"""What the trainer asks of a task: a loss to minimise, and validation metrics."""

from typing import Protocol

from torch import Tensor, nn

from kfac_bench.data.base.batch import Batch
from kfac_bench.tasks.evaluation import Evaluation
from kfac_bench.tasks.prediction import Prediction


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
