"""Batches of samples that worker processes read from files, in the order of given indices.

Batch systems send a signal to every process of a job step; a terminal sends Ctrl-C to the whole
process group. The main process of a rank reacts to such a signal: it saves a checkpoint, for which
it still needs its workers, and then ends. So workers ignore signals from everybody except their
own main process.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.queues import Queue
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from kfac_bench import output
from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.files import Faults, Unreadable
from kfac_bench.errors import UsageError, WorkerLostError, one_line, shortage
from kfac_bench.stop_signals import SIGNALS

Sample = tuple[Any, ...] | Unreadable
"""Tensors or numbers of one example, or the reason why it cannot be read."""


def load_batches(
    samples: Dataset[Sample],
    indices: Iterator[Tensor],
    workers: int,
    empty: Batch,
    faults: Faults,
    stack: Callable[[list[Any]], Batch] = default_collate,
) -> Iterator[Batch]:
    """Yield one batch of `samples` for each tensor of indices.

    Batches do not depend on `workers`. Global random state is neither read nor changed. Unreadable
    samples go to `faults`, which raises UsageError or lets the batch continue without them.

    Args:
        samples: Map from an index to a sample.
        indices: Indices of the samples of each batch.
        workers: Number of processes that read ahead; 0 reads in this process.
        empty: The batch to yield where no sample is left.
        faults: Collects the unreadable samples.
        stack: Makes a batch of a list of samples.

    Raises:
        UsageError: A sample is unreadable, or `stack` raised this error.
    """
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_sampler=(batch.tolist() for batch in indices),
        num_workers=workers,
        # Workers inherit blocked signals and the user's problem file. Python 3.14 would not fork.
        multiprocessing_context="fork" if workers else None,
        collate_fn=partial(_collate, stack),
        pin_memory=torch.cuda.is_available(),
        # Without a generator the loader would draw its workers' seed from the global state.
        generator=torch.Generator(),
        worker_init_fn=_prepare_worker,
    )
    # Workers inherit the blocked signals. Blocking them only in the worker itself would leave a gap
    # in which a signal could end it.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        batches: Iterator[Any] = _Workers(loader) if workers else iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    for batch, bad in _from_live_workers(batches) if workers else batches:
        for fault in bad:
            faults.add(fault)
        if isinstance(batch, UsageError):
            raise batch
        # Pinning turns the tuple into a list.
        yield empty if batch is None else tuple(batch)


SIGNAL_S = 0.5
"""So long after a broken connection the signal of a dead worker may arrive."""


class _Workers(_MultiProcessingDataLoaderIter):
    """Worker processes that read batches. Their end prints no traceback.

    Where memory, threads or files run out, torch's iterator is only half made, and its `__del__`
    raises an error that Python prints after the line about the cause.
    """

    _shutdown = True  # until the constructor has made the first queue

    def __del__(self) -> None:
        with suppress(Exception):
            super().__del__()


def _from_live_workers(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of worker processes, and report a worker that died.

    Raises:
        WorkerLostError: A worker died. torch says so in one of several ways, for example when this
            process fetches a tensor from the dead worker.
    """
    while True:
        try:
            batch = next(batches, None)
        except (ConnectionError, EOFError, FileNotFoundError) as error:
            if str(error).startswith("Caught "):  # a live worker sent the error
                raise
            # torch also reports the death in the handler of a signal, at any statement. It must not
            # interrupt what the error of this function makes its callers do.
            with suppress(RuntimeError):
                time.sleep(SIGNAL_S)
            raise WorkerLostError(str(error)) from None
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker (pid"):
                raise
            raise WorkerLostError(str(error)) from None
        if batch is None:
            return
        yield batch


def _prepare_worker(worker: int) -> None:
    """Block signals in a worker, but end on SIGTERM from the main process, and on lost batches.

    The DataLoader sends SIGTERM to a worker that hangs.
    """
    sys.excepthook = lambda kind, error, trace: _end_worker(error)
    Queue._on_queue_feeder_error = staticmethod(  # type: ignore[attr-defined]
        lambda error, batch: _end_worker(error)
    )
    # A forked worker inherits the blocked signals; a spawned one must block them here.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    reader = multiprocessing.parent_process()
    assert reader is not None

    def wait() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != reader.pid:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _end_worker(error: BaseException) -> NoReturn:
    """End a worker whose threads cannot hand over a batch, because too many files are open, say.

    Otherwise they would only print a traceback, and the main process would wait for the batch.
    """
    # A broken pipe means that the main process has ended.
    if not isinstance(error, ConnectionError):
        output.say(f"a process that reads data: {shortage(error) or one_line(error)}", sys.stderr)
    os._exit(1)


def _collate(
    stack: Callable[[list[Any]], Batch], samples: list[Sample]
) -> tuple[Batch | UsageError | None, list[Unreadable]]:
    bad = [sample for sample in samples if isinstance(sample, Unreadable)]
    good = [sample for sample in samples if not isinstance(sample, Unreadable)]
    try:
        return tuple(stack(good)) if good else None, bad
    except UsageError as error:
        # An error that a worker raises arrives with a traceback in its message.
        return error, bad
    except RuntimeError as error:
        # Files may run out already where the batch gets its shared memory.
        if shortage(error) is None or get_worker_info() is None:
            raise
        _end_worker(error)
