"""What the trainer asks of a task: a loss to minimise and figures to judge by."""

from typing import Protocol

from torch import Tensor, nn

from kfac_bench.data.data import Batch


class Task(Protocol):
    """A training objective and exact validation figures.

    `metric` names the entry of `metrics()` that a target is about, `higher_is_better` its
    direction. `num_totals` is the length of `totals()`: a rank without any evaluation batch
    contributes that many zeros.

    `likelihood` is the distribution that the model's output stands for, as `KFAC.fisher_backward`
    names it: its labels are what a Fisher other than the empirical one is an expectation over.
    """

    metric: str
    higher_is_better: bool
    num_totals: int
    likelihood: str

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the differentiable training loss, a scalar, and the output it was made from.

        The loss is the MEAN over the examples: K-FAC relies on it, it undoes the factor 1/n to make
        G independent of the batch. It is the negative log likelihood, of the scale that
        `KFAC.fisher_backward` documents, up to terms linear in the output (label smoothing is one).
        """
        ...

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return sums over the examples, float64 [num_totals], the first the number of examples.

        Totals add up over batches and ranks; a mean of means over unequal batches would be wrong.
        The caller sets the model to evaluation mode; no gradient is recorded.
        """
        ...

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return the figures of the whole evaluation set from its summed totals."""
        ...


def reached(task: Task, value: float, target: float) -> bool:
    """Say whether `value` of the task's metric is at least as good as `target`; NaN never is."""
    return value >= target if task.higher_is_better else value <= target
