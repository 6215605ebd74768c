"""Sums of moments that a thread beside training computes."""

from collections.abc import Callable, Iterable
from concurrent.futures import wait
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from kfac_bench.core.capture.derivatives import Family
from kfac_bench.core.capture.moments import Collected, Forward, Moments
from kfac_bench.core.execution.background import Background, Pending
from kfac_bench.core.layers.base import Layer

MAX_WAITING = 8
"""Calls of layers whose x and g the thread has not read yet, at most: they take memory."""


class BackgroundMoments(Moments):
    """Moments that are summed on the thread, in the order in which the calls arrive.

    :meth:`pop` waits for the sums. So they have the same bits as without the thread, and no x and
    no g is kept beyond a step.
    """

    def __init__(self, background: Background, moments: Moments) -> None:
        self._background, self._moments = background, moments
        self._pending: list[Pending[None]] = []

    def add(self, layer: Layer, x: Any, g: Tensor, forward: Forward, **options: Any) -> None:
        """See :meth:`Moments.add`."""
        add = partial(self._moments.add, layer, x, g, forward, **options)
        reads = (x.data if isinstance(x, PackedSequence) else x, g)
        self._submit(partial(_check_unchanged, add, layer.name, reads, _versions(reads)), reads)

    def add_use(self, number: int, use: tuple[bool, Tensor, Tensor], family: Family) -> None:
        """See :meth:`Moments.add_use`."""
        self._submit(partial(self._moments.add_use, number, use, family), use[1:])

    def _submit(self, job: Callable[[], None], reads: Iterable[Tensor] = ()) -> None:
        if len(self._pending) >= MAX_WAITING:
            wait([self._pending[-MAX_WAITING].future])
        self._pending.append(self._background.submit(job, reads))

    def end_backward(self, *, first: bool) -> None:
        """See :meth:`Moments.end_backward`."""
        self._submit(partial(self._moments.end_backward, first=first))

    def count_loss_samples(self, layer: Layer, g: Tensor, forward: Forward) -> None:
        """See :meth:`Moments.count_loss_samples`."""
        self._submit(partial(self._moments.count_loss_samples, layer, g, forward))

    def forget(self, name: str) -> None:
        """See :meth:`Moments.forget`."""
        self._submit(partial(self._moments.forget, name))

    def forget_where(self, name: str, is_discarded: Tensor) -> None:
        """See :meth:`Moments.forget_where`."""
        job = partial(self._moments.forget_where, name, is_discarded)
        self._submit(job, (is_discarded,))

    def take(self, name: str) -> Collected | None:
        """Refuse: ``overlap`` takes the sums of a layer early, and is off beside a thread."""
        raise NotImplementedError

    def pop(self) -> dict[str, Collected]:
        """See :meth:`Moments.pop`. Raise what the thread raised since the last call."""
        popped = self._background.submit(self._moments.pop)
        pending, self._pending = self._pending, []
        wait([popped.future])
        for job in pending:
            job.result()
        collected = popped.result()
        for new in collected.values():
            made = (getattr(new, name) for name in Collected.__slots__)
            self._background.take_over(x for x in made if isinstance(x, Tensor))
        return collected


def _check_unchanged(
    add: Callable[[], None], name: str, reads: Iterable[Tensor], versions: list[int]
) -> None:
    add()
    if _versions(reads) != versions:
        raise RuntimeError(
            f"background=True: the input of {name}, or the gradient of its output, was changed in "
            "place between its backward and step(); change a copy, or set background=False"
        )


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often tensors were changed in place, where torch counts it."""
    return [0 if x.is_inference() else x._version for x in tensors]
