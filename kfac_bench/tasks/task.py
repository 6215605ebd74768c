"""What the trainer asks of a task: a loss to minimise and figures to judge by."""

from typing import Protocol

from torch import Tensor, nn

from kfac_bench.data.base.batch import Batch
from kfac_bench.tasks.evaluation import Evaluation
from kfac_bench.tasks.prediction import Prediction


class Task(Protocol):
    """A training objective and exact validation figures.

    `metric` names the figure of an evaluation that a target is about, `higher_is_better` its
    direction.

    `likelihood` is the distribution that the model's output stands for, as `KFAC.fisher_backward`
    names it: its labels are what a Fisher other than the empirical one is an expectation over. A
    task whose likelihood is of another curvature than 1 has a `curvature`, too.
    """

    metric: str
    higher_is_better: bool
    likelihood: str

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the differentiable training loss, a scalar, and the output it was made from.

        The loss is the MEAN over the examples: K-FAC relies on it, it undoes the factor 1/n to make
        G independent of the batch. It is the negative log likelihood, of the scale that
        `KFAC.fisher_backward` documents, up to terms linear in the output (label smoothing is one).
        """
        ...

    def evaluation(self) -> Evaluation:
        """Start a pass over the evaluation set."""
        ...

    def show(self, model: nn.Module, batch: Batch, count: int) -> list[Prediction]:
        """Return at most `count` examples of an evaluation batch, for people to look at.

        The worst ones first, unless finding them costs too much: what the model gets wrong tells
        more than what it gets right. The model is in evaluation mode, no gradient is recorded.
        Where forwards are messages, all ranks call it alike.
        """
        ...


def reached(task: Task, value: float, target: float) -> bool:
    """Say whether `value` of the task's metric is at least as good as `target`; NaN never is."""
    return value >= target if task.higher_is_better else value <= target
