"""The batches of a rank: how many a run has, which ones a rank reads, and examples left out.

The trainer moves the batches to the device. :mod:`kfac_bench.data.base.order` decides their order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from kfac_bench.config import TrainerConfig
from kfac_bench.data.base.batch import Batch, size
from kfac_bench.data.base.dataset import Data
from kfac_bench.data.base.files import Faults
from kfac_bench.data.base.order import Shard, steps_per_epoch
from kfac_bench.distributed.backend import Backend
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import RunFailedError, UsageError
from kfac_bench.record.event_log import EventLog
from kfac_bench.record.events import SampleSkipped
from kfac_bench.training import predictions
from kfac_bench.training.stop import Stop

DEFAULT_EPOCHS = 20
"""Length of a run that sets neither trainer.max_epochs nor trainer.max_steps."""


@dataclass(frozen=True)
class RunLength:
    """The length of a run in steps, epochs and examples. A `step` is a number of updates done.

    Batches and examples are counted over all ranks together, so all ranks have the same length.
    """

    train_size: int
    """Examples of an epoch."""
    batch_size: int
    steps_per_epoch: int
    max_steps: int

    @classmethod
    def of(cls, config: TrainerConfig, train_size: int) -> RunLength:
        """Return the length of a run over `train_size` examples."""
        per_epoch = steps_per_epoch(train_size, config.batch_size, config.drop_last)
        return cls(train_size, config.batch_size, per_epoch, _max_steps(config, per_epoch))

    def epoch(self, step: int) -> float:
        """Return the number of passes over the data after `step` updates, perhaps a fraction."""
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


MOST_TRIED = 100
"""Number of examples to try before a rank that needs any one readable example gives up."""


class RankBatches:
    """The batches of this rank as the dataset gives them: on the CPU, not prepared."""

    def __init__(
        self, data: Data, config: TrainerConfig, seed: int, backend: Backend, length: RunLength
    ) -> None:
        self._data, self._config, self._seed, self._length = data, config, seed, length
        self._ranks, self._lockstep = backend.ranks, backend.lockstep
        self._shard = Shard(self._ranks.rank, self._ranks.world_size)
        self._evaluated = 0

    def train(self, step: int) -> Iterator[Batch]:
        """Yield the training batches after `step`, up to the end of the epoch.

        Their order depends on seed, epoch and rank alone.
        """
        epoch, start = divmod(step, self._length.steps_per_epoch)
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
        stand_in: Batch | None = None
        batches = filter(size, self._data.evaluate(self._config.eval_batch_size, self._shard))
        while True:
            batch = None if stop.signal else next(batches, None)
            if not self._lockstep and batch is None:
                return
            # All ranks must ask each other here, also those that still have a batch.
            if self._lockstep and not self._ranks.any(batch is not None):
                return
            if batch is None and stand_in is None:
                stand_in = self._first(self._data.evaluate(1, Shard()))
            shown = stand_in if batch is None else batch
            assert shown is not None
            yield shown, batch is not None
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


@dataclass
class SkippedExamples:
    """The examples that `data.on_error=skip` left out. All ranks call every method together.

    With `data.on_error=fatal` no method sends a message or changes anything.
    """

    ranks: Ranks
    faults: Faults
    least: int = 1
    """Smallest non-empty part of a batch that a rank can train on."""
    _reported: set[str] = field(default_factory=set)
    """Paths with an event: one event is enough if several ranks meet the same file."""

    def count(self, batch: Batch, step: int, expected: int) -> tuple[int, bool, str]:
        """Count the examples of one update over all ranks; `expected` if none may be left out.

        Returns:
            The number of examples, whether `report` has something to report, and why the update
            `step` is impossible (empty if it is possible).
        """
        if not self.faults.skip:
            return expected, False, ""
        too_few = 0 < size(batch) < self.least
        mine = [size(batch), len(self.faults.new), int(too_few)]
        examples, new, ranks = self.ranks.sum_numbers(mine)
        problem = ""
        if not examples:
            problem = f"no example of batch {step} can be read, on any rank; repair the files"
        elif ranks:
            problem = (
                f"only one example of a part of batch {step} can be read, and batch norm needs "
                "two: repair the files, or set a larger trainer.batch_size"
            )
        return int(examples), new > 0, problem

    def left_out(self, since: int, has_examples: bool) -> int:
        """Return the number of evaluation examples that all ranks have left out together.

        Args:
            since: This rank's count before the evaluation.
            has_examples: Whether this rank could read any example.

        Raises:
            RunFailedError: If no rank could read any example.
        """
        if not self.faults.skip:
            return 0
        if not self.ranks.any(has_examples):
            raise RunFailedError(
                "no example of the evaluation set can be read, on any rank; repair the files"
            )
        return int(self.ranks.sum_numbers([self.faults.left_out - since])[0])

    def report(self, log: EventLog, step: int, train_s: float) -> None:
        """Emit an event for each unreadable file that a rank has met since the last call."""
        if not self.faults.skip:
            return
        mine = [(fault.path, fault.reason) for fault in self.faults.take()]
        for rank, content in enumerate(self.ranks.gather(json.dumps(mine).encode())):
            for path, reason in json.loads(content):
                if path not in self._reported:
                    self._reported.add(path)
                    log.emit(SampleSkipped(step, train_s, path, reason, rank, len(self._reported)))
