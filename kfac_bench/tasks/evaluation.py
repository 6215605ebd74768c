"""Figures of a whole evaluation set, exact on any number of ranks."""

from typing import Protocol

import torch
from torch import Tensor, nn

from kfac_bench.data.base.batch import Batch
from kfac_bench.distributed.ranks import Ranks


class Evaluation(Protocol):
    """One pass over the evaluation set, of which each rank sees a part."""

    def add(self, model: nn.Module, batch: Batch) -> None:
        """Look at a batch of this rank. The model is in evaluation mode, no gradient is recorded.

        No rank waits for another: they may have different numbers of batches, also none.
        """
        ...

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """The figures over all examples of all ranks, the same on each; all ranks call it."""
        ...


class SummedTask:
    """Base of tasks whose figures follow from sums over the examples."""

    num_totals: int

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return sums over the examples, float64 [num_totals], the first the number of examples.

        Totals add up over batches and ranks; a mean of means over unequal batches would be wrong.
        """
        raise NotImplementedError

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return the figures of the whole evaluation set from its summed totals."""
        raise NotImplementedError

    def evaluation(self) -> Evaluation:
        """A pass that adds up totals."""
        return _Sums(self)


class _Sums:
    def __init__(self, task: SummedTask) -> None:
        self._task = task
        self._totals = torch.zeros(task.num_totals, dtype=torch.float64)

    def add(self, model: nn.Module, batch: Batch) -> None:
        new = self._task.totals(model, batch)
        self._totals = self._totals.to(new.device) + new

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        return self._task.metrics(ranks.sum(self._totals.to(ranks.device)).cpu())
