"""Which batches a rank reads: to train on, to evaluate, to look at."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from kfac_bench.config import TrainerConfig
from kfac_bench.data.base.batch import Batch, size
from kfac_bench.data.base.dataset import Data
from kfac_bench.data.base.order import Shard
from kfac_bench.distributed.backend import Backend
from kfac_bench.errors import UsageError
from kfac_bench.training import predictions
from kfac_bench.training.course import Course
from kfac_bench.training.stop import Stop

STAND_INS = 100
"""Examples that a rank without one tries to read before it gives up."""


class Feed:
    """Batches of this rank, as the data gives them: on the CPU, not prepared."""

    def __init__(
        self, data: Data, config: TrainerConfig, seed: int, backend: Backend, course: Course
    ) -> None:
        self._data, self._config, self._seed, self._course = data, config, seed, course
        self._ranks, self._lockstep = backend.ranks, backend.lockstep
        self._shard = Shard(self._ranks.rank, self._ranks.world_size)

    def train(self, step: int) -> Iterator[Batch]:
        """From the update after ``step`` to the end of its epoch.

        The order is a function of seed, epoch and rank alone.
        """
        epoch, start = divmod(step, self._course.steps_per_epoch)
        config = self._config
        return self._data.train(
            config.batch_size, self._seed, epoch, start, self._shard, config.drop_last
        )

    def evaluate(self, stop: Stop) -> Iterator[tuple[Batch, bool]]:
        """The evaluation set's, and whether they count; none after ``stop``.

        In lockstep, as many as the rank with the most has: others repeat an example.
        """
        batches = filter(size, self._data.evaluate(self._config.eval_batch_size, self._shard))
        while True:
            batch = None if stop.signal else next(batches, None)
            if not self._lockstep and batch is None:
                return
            if self._lockstep and not self._ranks.any(batch is not None):
                return
            yield batch or self._first(self._data.evaluate(1, Shard())), batch is not None

    def show(self) -> Iterator[Batch]:
        """The evaluation set's, the same on all ranks, of what goes through a model at once."""
        a_ranks = -(-self._config.eval_batch_size // self._ranks.world_size)
        return filter(size, self._data.evaluate(min(a_ranks, predictions.POOL), Shard()))

    def first_example(self) -> Batch:
        """Of the training set: for a rank that has none."""
        return self._first(self._data.train(1, self._seed, 0, 0, Shard()))

    def _first(self, batches: Iterator[Batch]) -> Batch:
        """The first that has an example; those passed over do not count as left out."""
        left_out = self._data.faults.left_out
        batch = next(filter(size, islice(batches, STAND_INS)), None)
        self._data.faults.left_out = left_out
        if batch is None:
            raise UsageError(f"none of the first {STAND_INS} examples can be read")
        return batch
