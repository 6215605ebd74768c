"""Saving: when a run writes a checkpoint, and that it ends if a checkpoint cannot be written."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kfac_bench.config import TrainerConfig
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import RunFailedError, UsageError
from kfac_bench.record import checkpoint_folder
from kfac_bench.training.checkpoint import ValidationMetric, Writer

CHECKPOINT_INTERVAL_S = 60.0
"""Least time between checkpoints at epoch ends: an epoch of a demo lasts milliseconds."""


class Saving(Writer):
    """The checkpoints of a run in `directory`. Training goes on while one is being written.

    All ranks call `is_due`, `start` and `finish` together. If one rank cannot write, `start` and
    `finish` raise `RunFailedError` on all ranks.
    """

    def __init__(
        self,
        directory: Path,
        ranks: Ranks,
        config: TrainerConfig,
        steps_per_epoch: int,
        before_commit: Callable[[], None],
    ) -> None:
        self._freq, self._steps_per_epoch = config.checkpoint_freq, steps_per_epoch
        keep = config.keep_last, config.keep_best
        super().__init__(directory, ranks, *keep, before_commit, self._freq)
        self.step = -1
        """Step of the newest checkpoint, complete or in flight."""
        self._started_s = time.monotonic()
        self._metric: tuple[int, ValidationMetric] | None = None  # the newest, with its step

    def set_metric(self, step: int, metric: ValidationMetric) -> None:
        """Note the metric of the weights after `step`. trainer.keep_best compares metrics."""
        self._metric = (step, metric)
        if step == self.step and self._ranks.is_main:
            # A run that was interrupted in this evaluation saved before it. With resume=PATH the
            # checkpoint is another run's, and this folder has none.
            with suppress(OSError, ValueError, UsageError):
                checkpoint_folder.add_metric(
                    checkpoint_folder.path_of(self._directory, step), metric
                )

    def is_due(self, step: int) -> bool:
        """Return whether it is time for a checkpoint."""
        if self._freq is not None:
            return step % self._freq == 0
        if step % self._steps_per_epoch:
            return False
        # Clocks of ranks differ, and a checkpoint needs all ranks: they decide together.
        return self._ranks.any(time.monotonic() - self._started_s > CHECKPOINT_INTERVAL_S)

    def start(
        self, step: int, shard: dict[str, Any], metric: ValidationMetric | None = None
    ) -> None:
        """Begin a checkpoint with this rank's `shard`, once the previous one is complete."""
        metric = metric or (self._metric[1] if self._metric and self._metric[0] == step else None)
        with _ending_the_run():
            super().start(step, shard, metric)
        self.step, self._started_s = step, time.monotonic()

    def finish(self) -> None:
        """Wait for the checkpoint in flight."""
        with _ending_the_run():
            super().finish()


@contextmanager
def _ending_the_run() -> Iterator[None]:
    """Turn the failure to write a checkpoint, which all ranks see, into the end of the run."""
    try:
        yield
    except OSError as error:
        raise RunFailedError(f"{error}; older checkpoints are untouched") from None
