"""A thread beside training, on which ``KFAC(background=True)`` computes.

:class:`BackgroundMoments` sums moments on the thread, and :class:`BackgroundSlices` decomposes.
Only the number of the step decides when a result is used. So results are equal bit by bit, on a
slow and on a fast thread.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from kfac_bench.core.capture.calls import Family
from kfac_bench.core.capture.moments import Collected, Forward, Moments
from kfac_bench.core.execution.decomposition import Decomposition, FactorKey
from kfac_bench.core.execution.solver import Solver
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.plan import Decompose, Op, Plan

T = TypeVar("T")


class Pending(Generic[T]):
    """The result of a job that may still run."""

    def __init__(self, future: Future[tuple[T, Any]], device: torch.device) -> None:
        self.future, self._device = future, device

    def result(self) -> T:
        """Wait for the job. Return its result, or raise its exception."""
        value, done = self.future.result()
        if done is not None:
            # The thread has only issued the work to the GPU: the caller's stream waits for the end.
            torch.cuda.current_stream(self._device).wait_event(done)
        return value


class Background:
    """One thread that runs jobs in the order in which they are submitted.

    It computes on one core, whatever ``torch.set_num_threads`` says. On a GPU its work goes to a
    stream of its own. The thread starts with the first job. It ends with :meth:`stop`, or when
    nothing refers to this object any more.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: ThreadPoolExecutor | None = None
        _in_process.add(self)

    def submit(self, job: Callable[[], T], reads: Iterable[Tensor] = ()) -> Pending[T]:
        """Let the thread run a job, which reads the tensors ``reads``."""
        if self._pool is None:
            self._pool = _start_thread()
        ready = None
        if self._stream is not None:
            ready = torch.cuda.current_stream(self.device).record_event()
            for x in reads:
                x.record_stream(self._stream)
        return Pending(self._pool.submit(self._run, job, ready), self.device)

    def _run(self, job: Callable[[], T], ready: Any) -> tuple[T, Any]:
        with torch.no_grad():
            if self._stream is None:
                return job(), None
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                return job(), self._stream.record_event()

    def take_over(self, tensors: Iterable[Tensor]) -> None:
        """Note that the caller's stream uses tensors of a job, which belong to another stream."""
        if self._stream is not None:
            for x in tensors:
                x.record_stream(torch.cuda.current_stream(self.device))

    def wait(self) -> None:
        """Wait until all jobs have ended."""
        if self._pool is not None:
            self._pool.submit(int).result()

    def stop(self) -> None:
        """Wait until all jobs have ended, and end the thread. A state may still be saved."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def forget_thread(self) -> None:
        """Note that this process, a fork, lacks the thread; the next job starts another one."""
        self._pool = None


def _start_thread() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1, "kfac-background")
    threads = torch.get_num_threads()
    pool.submit(_use_one_core).result()
    # torch also gives the last number to threads that start later, so the caller's comes last.
    torch.set_num_threads(threads)
    return pool


def _use_one_core() -> None:
    # In each thread torch first takes over the caller's number, which would replace this one.
    torch.get_num_threads()
    torch.set_num_threads(1)


_in_process: WeakSet[Background] = WeakSet()


def wait_for_all() -> None:
    """Wait until the threads of all KFACs in this process have ended their jobs."""
    for background in list(_in_process):
        background.wait()


def _forget_threads() -> None:
    for background in list(_in_process):
        background.forget_thread()


# A fork copies results but no threads. So all jobs end before a fork, as for DataLoader's workers.
os.register_at_fork(before=wait_for_all, after_in_child=_forget_threads)


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

    def pop_layer(self, name: str) -> Collected | None:
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
    """Return the number of changes in place of each tensor, where torch counts them."""
    return [0 if x.is_inference() else x._version for x in tensors]


Made = Mapping[FactorKey, Decomposition]
"""Decompositions by factor. Those that failed are missing."""


class BackgroundSlices:
    """The slices that have begun and are not in use yet.

    All ranks begin and use the same slices at the same steps, also slices that they have no work
    in. A rank decomposes copies of the running factors, because these change at the next update.

    Attributes:
        due: By slice, the step in which its decompositions come into use.
    """

    def __init__(self, plan: Plan, rank: int, solver: Solver, background: Background) -> None:
        self.due: dict[int, int] = {}
        self._plan, self._rank = plan, rank
        self._solver, self._background = solver, background
        self._results: dict[Decompose, Callable[[], Made]] = {}

    def begin(self, slices: Mapping[int, int], damping: float | None) -> None:
        """Begin slices with the factors as they are now.

        Args:
            slices: By slice, the step in which its decompositions come into use. A slice that has
                begun before and is not in use yet does not begin again.
            damping: The damping of this step, for the inverse method.
        """
        for i, step in slices.items():
            if i in self.due:
                continue
            self.due[i] = step
            for op in self._my_ops(i):
                batch = self._solver.batch(op.members, damping, copy=True)
                job = partial(self._solver.solve, batch)
                reads = (*batch.matrices, *batch.dampings, *batch.bases)
                self._results[op] = self._background.submit(job, reads).result

    def _my_ops(self, index: int) -> Iterator[Decompose]:
        for op in self._plan.slices[index]:
            if isinstance(op, Decompose) and self._rank in op.ranks:
                yield op

    def pop_due(self, step: int) -> list[int]:
        """Return the slices that come into use in this step. They may begin again from now on."""
        due = [i for i, at in self.due.items() if at == step]
        for i in due:
            del self.due[i]
        return due

    def pop(self, op: Decompose) -> Made | None:
        """Wait for the decompositions of an op, and return them; None if it has not begun."""
        result = self._results.pop(op, None)
        if result is None:
            return None
        made = result()
        self._background.take_over(x for part in made.values() for x in part.tensors)
        return made

    def clear(self) -> None:
        """Forget all slices that have begun."""
        self.due.clear()
        self._results.clear()

    def pending(self) -> Iterator[tuple[FactorKey, int, Decomposition | None]]:
        """Wait for this rank's decompositions; yield them with the step in which they are used."""
        for i, step in self.due.items():
            for op in self._my_ops(i):
                made = self._results[op]()
                for spec, factor in op.members:
                    key = (spec.name, factor)
                    yield key, step, made.get(key)

    def restore(self, due: Mapping[int, int], made: Made) -> None:
        """Restore the slices that had begun in a saved run, with all their decompositions."""
        self.due = dict(due)
        for i in due:
            for op in self._my_ops(i):
                keys = [(spec.name, factor) for spec, factor in op.members]
                mine = {key: made[key] for key in keys if key in made}
                self._results[op] = partial(dict, mine)


def factors_of(ops: Sequence[Op]) -> list[FactorKey]:
    """Return the factors that a slice decomposes."""
    return [
        (spec.name, factor)
        for op in ops
        if isinstance(op, Decompose)
        for spec, factor in op.members
    ]
