"""The outcome of a training step: the loss over all ranks, and flags for the other ranks.

The trainer sends the outcome of a step within the step, and reads it during the next step. So the
device always has work: no step waits until its own loss has been computed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_bench.distributed.ranks import Ranks


@dataclass(frozen=True)
class StepOutcome:
    """What all ranks know about one step."""

    step: int
    """The number of the update, from 1."""
    loss: float
    """The mean loss over all ranks."""
    should_stop: bool
    """Whether some rank was told to stop before it sent the outcome."""
    cannot_write: bool
    """Whether some rank cannot write a checkpoint or the record."""


class Outcomes:
    """The outcomes of the steps of a run, with at most one in flight.

    All ranks call `send` and `read` together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._in_flight: tuple[int, Callable[[], list[float]]] | None = None

    def send(self, step: int, loss: Tensor, *, should_stop: bool, cannot_write: bool) -> None:
        """Send the loss of this rank and the two flags to all ranks. It waits for no device.

        The outcome of the step before must have been read.
        """
        assert self._in_flight is None
        # new_full fills on the device. A tensor made of Python numbers would be copied there, and
        # such a copy waits for the device.
        flags = [loss.new_full((), float(flag)) for flag in (should_stop, cannot_write)]
        self._in_flight = step, _start(self._ranks, torch.stack([loss, *flags]))

    def read(self) -> StepOutcome | None:
        """Wait for the outcome in flight and return it, or None if there is none."""
        if self._in_flight is None:
            return None
        (step, wait), self._in_flight = self._in_flight, None
        total, stops, troubles = wait()
        return StepOutcome(step, total / self._ranks.world_size, stops > 0, troubles > 0)


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
