"""What a :class:`Trained` event records besides the loss: rates and means since the last event."""

from collections.abc import Iterator
from typing import Any

import torch

from kfac_bench.core import KFAC
from kfac_bench.data.base.batch import Batch
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.record.events import Clock
from kfac_bench.training import environment
from kfac_bench.training.stages import StageTimes


class Meter:
    """The counters between two events. They count training time only, while ``clock`` runs."""

    def __init__(self, kfac: KFAC | None, ranks: Ranks, clock: Clock) -> None:
        self._kfac, self._ranks, self._clock = kfac, ranks, clock
        self._stages = None if kfac is None else StageTimes(kfac, ranks)
        self._examples, self._train_s = 0, 0.0  # as of the last event
        self._waited_s = 0.0  # for batches, since the last event

    def start(self, examples: int) -> None:
        """Start to count; ``examples`` were seen before."""
        self._examples, self._train_s, self._waited_s = examples, self._clock.train_s(), 0.0

    def waiting(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the same batches, and count the time that the trainer waits for them."""
        while True:
            began = self._clock.train_s()
            batch = next(batches, None)
            self._waited_s += self._clock.train_s() - began
            if batch is None:
                return
            yield batch

    def add_step(self) -> None:
        """Count the update that has just ended."""
        if self._stages is not None:
            self._stages.add()

    def read(self, examples: int) -> dict[str, Any]:
        """Return the fields of an event after ``examples`` examples, and start again.

        All ranks call this.
        """
        examples_since = examples - self._examples
        seconds = self._clock.train_s() - self._train_s
        # Ranks wait for the slowest one, so the largest share counts.
        waited = self._ranks.max(self._waited_s / seconds if seconds > 0 else 0.0)
        memory = self._ranks.max(environment.peak_memory_bytes(self._ranks.device))
        self.start(examples)
        return self.kfac_statistics() | {
            "examples_per_s": examples_since / seconds if seconds > 0 else 0.0,
            "data_wait_share": waited,
            "peak_memory_bytes": memory,
        }

    def kfac_statistics(self) -> dict[str, Any]:
        """Return the fields of K-FAC. All ranks call this."""
        if self._kfac is None or self._stages is None:
            return {}
        counts = torch.tensor(
            [self._kfac.failed_decompositions, self._kfac.dropped_statistics],
            device=self._ranks.device,
        )
        failed, dropped = self._ranks.sum(counts).tolist()
        return self._kfac.statistics() | {
            "stage_mean_s": self._stages.mean_s(),
            "damping": self._kfac.damping,
            "failed_decompositions": failed,
            "dropped_statistics": dropped,
        }
