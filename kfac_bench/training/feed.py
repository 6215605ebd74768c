"""The feed: which batches a rank reads to train, to evaluate and to show."""

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

MOST_TRIED = 100
"""Number of examples to try before a rank that needs any one readable example gives up."""


class Feed:
    """The batches of this rank as the dataset gives them: on the CPU, not prepared."""

    def __init__(
        self, data: Data, config: TrainerConfig, seed: int, backend: Backend, course: Course
    ) -> None:
        self._data, self._config, self._seed, self._course = data, config, seed, course
        self._ranks, self._lockstep = backend.ranks, backend.lockstep
        self._shard = Shard(self._ranks.rank, self._ranks.world_size)
        self._evaluated = 0

    def train(self, step: int) -> Iterator[Batch]:
        """Yield the training batches after `step`, up to the end of the epoch.

        Their order depends on seed, epoch and rank alone.
        """
        epoch, start = divmod(step, self._course.steps_per_epoch)
        config = self._config
        return self._data.train(
            config.batch_size, self._seed, epoch, start, self._shard, config.drop_last
        )

    def evaluate(self, stop: Stop) -> Iterator[tuple[Batch, bool]]:
        """Yield evaluation batches, each with whether it counts, until `stop` has a signal.

        A backend in lockstep needs equally many forward passes on all ranks. A rank without further
        batches therefore repeats one example, which does not count.
        """
        self._evaluated = 0
        batches = filter(size, self._data.evaluate(self._config.eval_batch_size, self._shard))
        while True:
            batch = None if stop.signal else next(batches, None)
            if not self._lockstep and batch is None:
                return
            # All ranks must ask each other here, also those that still have a batch.
            if self._lockstep and not self._ranks.any(batch is not None):
                return
            yield batch or self._first(self._data.evaluate(1, Shard())), batch is not None
            self._evaluated += size(batch) if batch is not None else 0

    def evaluated(self) -> tuple[int, int]:
        """Return the examples that this rank has evaluated, and about how many it has."""
        return self._evaluated, -(-self._data.eval_size // self._ranks.world_size)

    def show(self) -> Iterator[Batch]:
        """Yield evaluation batches for predictions, the same ones on all ranks."""
        per_rank = -(-self._config.eval_batch_size // self._ranks.world_size)
        return filter(size, self._data.evaluate(min(per_rank, predictions.POOL), Shard()))

    def first_example(self) -> Batch:
        """Return a training example, for a rank whose part of a batch is empty."""
        return self._first(self._data.train(1, self._seed, 0, 0, Shard()))

    def _first(self, batches: Iterator[Batch]) -> Batch:
        """Return the first batch with an example. Unreadable examples before it do not count."""
        left_out = self._data.faults.left_out
        batch = next(filter(size, islice(batches, MOST_TRIED)), None)
        self._data.faults.left_out = left_out
        if batch is None:
            raise UsageError(
                f"none of the first {MOST_TRIED} examples can be read; repair the data"
            )
        return batch
