"""When a run is saved, and that it ends if it cannot be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kfac_bench.config import TrainerConfig
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import RunFailedError
from kfac_bench.training.checkpoint import Figure, Writer, Written

CHECKPOINT_INTERVAL_S = 60.0
"""Between checkpoints at epoch ends: epochs of a demo last milliseconds."""


class Saving:
    """Checkpoints of a run in ``directory``; steps between them are trained while one is written.

    All ranks call :meth:`is_due`, :meth:`start` and :meth:`finish`; those two raise
    :class:`RunFailedError` on all of them if one cannot write.
    """

    def __init__(
        self, directory: Path, ranks: Ranks, config: TrainerConfig, steps_per_epoch: int
    ) -> None:
        self._ranks = ranks
        self._freq, self._steps_per_epoch = config.checkpoint_freq, steps_per_epoch
        self._writer = Writer(directory, ranks, config.keep_last, config.keep_best)
        self.step = -1
        """Of the newest checkpoint, on disk or on its way."""
        self._started_s = time.monotonic()
        self._figure: tuple[int, Figure] | None = None  # the last, and its step

    def judge(self, step: int, figure: Figure) -> None:
        """The weights after ``step`` have that figure: trainer.keep_best goes by it."""
        self._figure = (step, figure)

    def is_due(self, step: int) -> bool:
        """Whether it is time for a checkpoint."""
        if self._freq is not None:
            return step % self._freq == 0
        if step % self._steps_per_epoch:
            return False
        return self._ranks.any(time.monotonic() - self._started_s > CHECKPOINT_INTERVAL_S)

    def start(self, step: int, shard: dict[str, Any]) -> None:
        """Begin one with this rank's ``shard``; the one before is complete then."""
        figure = self._figure[1] if self._figure and self._figure[0] == step else None
        with _failing():
            self._writer.start(step, shard, figure)
        self.step, self._started_s = step, time.monotonic()

    def finish(self) -> None:
        """Wait for the one on its way."""
        with _failing():
            self._writer.finish()

    def written(self) -> Written | None:
        """On rank 0: one that is complete by now and was not asked for before."""
        return self._writer.written()

    @property
    def failed(self) -> bool:
        """Whether this rank could not write: then all must be told, and :meth:`finish`."""
        return self._writer.failed

    def close(self) -> None:
        """After an error of this rank, when others may be gone: complete what can be."""
        self._writer.close()


@contextmanager
def _failing() -> Iterator[None]:
    """A checkpoint that cannot be written, on every rank, ends the run."""
    try:
        yield
    except OSError as error:
        raise RunFailedError(f"{error}; older checkpoints are untouched") from None
