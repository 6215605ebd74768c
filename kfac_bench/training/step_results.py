"""Results of training steps: the loss over all ranks, flags of ranks, rates and stage times.

:class:`PendingStepResults` carries what the next step needs. :class:`Meter` collects what a
:class:`Trained` event records besides the loss: rates and means since the last event.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_bench.core import KFAC
from kfac_bench.data.base.batch import Batch
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.training import environment


@dataclass(frozen=True)
class StepResult:
    """The result of one step, as all ranks know it."""

    step: int
    """The number of the update, from 1."""
    loss: float
    """The mean loss over all ranks."""
    should_stop: bool
    """True if some rank was told to stop before it sent the result."""
    cannot_write: bool
    """True if some rank cannot write a checkpoint or the record."""


class PendingStepResults:
    """The results of the steps of a run, with at most one in flight.

    The trainer sends the result of a step within the step, and reads it during the next step. So
    the device always has work: no step waits until its own loss has been computed. All ranks call
    `send` and `read` together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._in_flight: tuple[int, Callable[[], list[float]]] | None = None

    def send(self, step: int, loss: Tensor, *, should_stop: bool, cannot_write: bool) -> None:
        """Send the loss of this rank and the two flags to all ranks. It waits for no device.

        The result of the step before must have been read.
        """
        assert self._in_flight is None
        # new_full fills on the device. A tensor made of Python numbers would be copied there, and
        # such a copy waits for the device.
        flags = [loss.new_full((), float(flag)) for flag in (should_stop, cannot_write)]
        self._in_flight = step, _start(self._ranks, torch.stack([loss, *flags]))

    def read(self) -> StepResult | None:
        """Wait for the result in flight and return it, or None if there is none."""
        if self._in_flight is None:
            return None
        (step, wait), self._in_flight = self._in_flight, None
        total, stops, troubles = wait()
        return StepResult(step, total / self._ranks.world_size, stops > 0, troubles > 0)


def _start(ranks: Ranks, numbers: Tensor) -> Callable[[], list[float]]:
    """Start to sum `numbers` over ranks; return a function that waits for the sums."""
    work = ranks.start_sum(numbers)
    if not numbers.is_cuda:

        def wait() -> list[float]:
            work.wait()
            return list(numbers.tolist())

        return wait
    # On a GPU, wait() only orders the stream. The copy follows the sum, and this process goes on.
    work.wait()
    copy = numbers.to("cpu", non_blocking=True)
    is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    is_copied.record()

    def wait_for_copy() -> list[float]:
        is_copied.synchronize()
        return list(copy.tolist())

    return wait_for_copy


class StageTimes:
    """The sums of :attr:`KFAC.stage_s` since the last event.

    Each step counts, so a stage that runs every hundred steps is seen even if events are rare.
    """

    def __init__(self, kfac: KFAC, ranks: Ranks) -> None:
        self._kfac, self._ranks = kfac, ranks
        self._kinds = kfac.stage_names
        self._steps = 0
        self._total_s: dict[str, float] = defaultdict(float)

    def add(self) -> None:
        """Count the step that has just ended."""
        self._steps += 1
        for kind, seconds in self._kfac.stage_s.items():
            self._total_s[kind] += seconds

    def mean_s(self) -> dict[str, float]:
        """Return mean seconds per step since the last call, by kind of op. All ranks call this."""
        each = [self._total_s[kind] / max(1, self._steps) for kind in self._kinds]
        self._steps = 0
        self._total_s.clear()
        # All ranks have the same names in the same order, so one message carries all means.
        mean = torch.tensor(each, dtype=torch.float64, device=self._ranks.device)
        mean = self._ranks.sum(mean) / self._ranks.world_size
        return dict(zip(self._kinds, mean.tolist(), strict=True))


class Clock:
    """The training clock: a stopwatch that is paused during everything but training.

    Its kind is ``wall`` (the time of day) or ``cpu`` (the processor time of this process, less that
    of its threads that do not train).
    """

    def __init__(self, kind: str, not_training_s: Callable[[], float] = lambda: 0.0) -> None:
        self._not_training_s = not_training_s
        self._elapsed_s = 0.0
        self._since: float | None = None
        self._kind = kind

    def set(self, elapsed_s: float) -> None:
        """Stop the clock and set its reading."""
        self._elapsed_s, self._since = elapsed_s, None

    def _now(self) -> float:
        # perf_counter() does not jump when the system time is set.
        if self._kind == "wall":
            return time.perf_counter()
        return time.process_time() - self._not_training_s()

    def start(self) -> None:
        """Start the clock."""
        self._since = self._now()

    def stop(self) -> None:
        """Stop the clock."""
        self._elapsed_s, self._since = self.train_s(), None

    def train_s(self) -> float:
        """Return the seconds so far."""
        running = 0.0 if self._since is None else self._now() - self._since
        return self._elapsed_s + running

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the clock inside the block; a clock that was stopped before stays stopped."""
        was_running = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if was_running:
                self.start()


class Meter:
    """The counters between two events. They count training time only, while ``clock`` runs."""

    def __init__(self, kfac: KFAC | None, ranks: Ranks, clock: Clock) -> None:
        self._kfac, self._ranks, self._clock = kfac, ranks, clock
        self._stages = None if kfac is None else StageTimes(kfac, ranks)
        self._examples, self._train_s = 0, 0.0  # as of the last event
        self._waited_s = 0.0  # for batches, since the last event
        self._steps = 0  # since the last event

    def start(self, examples: int) -> None:
        """Start to count; ``examples`` were seen before."""
        self._examples, self._train_s, self._waited_s = examples, self._clock.train_s(), 0.0
        self._steps = 0

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
        self._steps += 1
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
        step_s = seconds / self._steps if self._steps else None
        self.start(examples)
        return self.kfac_statistics() | {
            "examples_per_s": examples_since / seconds if seconds > 0 else 0.0,
            "data_wait_share": waited,
            "peak_memory_bytes": memory,
            "step_mean_s": step_s,
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
            "condition": self._conditions(self._kfac),
        }

    def _conditions(self, kfac: KFAC) -> dict[str, float]:
        """Return :meth:`KFAC.conditions` of all layers; their means over ranks that know them."""
        mine, names = kfac.conditions(), kfac.layer_names
        numbers = [mine.get(name, 0.0) for name in names]
        both = self._ranks.sum_numbers([*numbers, *(float(name in mine) for name in names)])
        each = zip(names, both, both[len(names) :], strict=False)
        means = {name: total / count for name, total, count in each if count}
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}
