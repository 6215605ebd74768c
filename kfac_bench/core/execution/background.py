"""A thread beside training, on which ``KFAC(background=True)`` computes.

:class:`BackgroundMoments` and :class:`BackgroundSlices` say what the thread computes. Only the
number of the step decides when a result is used. So results are equal bit by bit, on a slow and on
a fast thread.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

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


def _wait_for_all() -> None:
    for background in list(_in_process):
        background.wait()


def _forget_threads() -> None:
    for background in list(_in_process):
        background.forget_thread()


# A fork copies results but no threads. So all jobs end before a fork, as for DataLoader's workers.
os.register_at_fork(before=_wait_for_all, after_in_child=_forget_threads)
