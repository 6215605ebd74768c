"""How long a run is, in steps, epochs and examples: plain counting, equal on all ranks."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from kfac_bench.config import TrainerConfig
from kfac_bench.data.base.order import steps_per_epoch

DEFAULT_EPOCHS = 20
"""Length of a run that sets neither trainer.max_epochs nor trainer.max_steps."""


@dataclass(frozen=True)
class Course:
    """The length of a run. A `step` is a number of updates done.

    Batches and examples are counted over all ranks together.
    """

    train_size: int
    """Examples of an epoch."""
    batch_size: int
    steps_per_epoch: int
    max_steps: int

    @classmethod
    def of(cls, config: TrainerConfig, train_size: int) -> Course:
        """Return the course of a run over `train_size` examples."""
        per_epoch = steps_per_epoch(train_size, config.batch_size, config.drop_last)
        return cls(train_size, config.batch_size, per_epoch, _max_steps(config, per_epoch))

    def epoch(self, step: int) -> float:
        """Return how often the run has passed over the data."""
        return step / self.steps_per_epoch

    def examples_seen(self, step: int) -> int:
        """Return the number of examples in all updates so far."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        per_epoch = min(self.steps_per_epoch * self.batch_size, self.train_size)
        return epochs * per_epoch + steps * self.batch_size

    def next_batch_size(self, step: int) -> int:
        """Return the size of the batch after `step`. The last batch of an epoch may be smaller."""
        start = step % self.steps_per_epoch * self.batch_size
        return min(self.batch_size, self.train_size - start)


def _max_steps(config: TrainerConfig, per_epoch: int) -> int:
    epochs = config.max_epochs
    if epochs is None:
        if config.max_steps is not None:
            return config.max_steps
        epochs = DEFAULT_EPOCHS
    return min(epochs * per_epoch, config.max_steps or sys.maxsize)
