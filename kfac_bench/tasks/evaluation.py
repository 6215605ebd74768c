"""Validation metrics of a whole evaluation set, exact on any number of ranks."""

from typing import Protocol

import torch
from torch import Tensor, nn

from kfac_bench.data.base.batch import Batch
from kfac_bench.distributed.ranks import Ranks


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
