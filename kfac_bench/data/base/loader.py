"""Samples read from files by worker processes, in the order of given indices.

Batch systems signal every process of a job step, terminals a whole group. Whether a run ends is its
rank's to decide, which saves first and needs the workers until then: so they hear of no signal but
their own process's.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.unreadable import Faults, Unreadable

_NOT_FOR_WORKERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

Sample = tuple[Any, ...] | Unreadable
"""Tensors or numbers of one example."""


def load_batches(
    samples: Dataset[Sample],
    indices: Iterator[Tensor],
    workers: int,
    empty: Batch,
    faults: Faults,
    stack: Callable[[list[Any]], Batch] = default_collate,
) -> Iterator[Batch]:
    """Yield a batch of `samples` per tensor of indices; `workers` processes read ahead (0: none).

    `empty` is the batch of no indices, `stack` makes one of a list of samples. Batches do not
    depend on `workers`. Global random state is neither read nor changed. A sample that is
    Unreadable is noted in `faults`, which raises UsageError or lets the batch go on without it.
    """
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_sampler=(batch.tolist() for batch in indices),
        num_workers=workers,
        collate_fn=partial(_collate, stack),
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # or the loader draws its workers' seed from global state
        worker_init_fn=_obey_the_parent,
    )
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_WORKERS)  # as workers begin, too
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
    for batch, bad in batches:
        for fault in bad:
            faults.add(fault)
        yield empty if batch is None else tuple(batch)  # pinning makes a list of it


def _obey_the_parent(worker: int) -> None:
    """In a worker: let these signals wait, but end when the process that reads terminates it.

    That is how the loader ends a worker that hangs.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_WORKERS)  # a fork was born with this
    reader = multiprocessing.parent_process()
    assert reader is not None

    def wait() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != reader.pid:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _collate(
    stack: Callable[[list[Any]], Batch], samples: list[Sample]
) -> tuple[Batch | None, list[Unreadable]]:
    bad = [sample for sample in samples if isinstance(sample, Unreadable)]
    good = [sample for sample in samples if not isinstance(sample, Unreadable)]
    return tuple(stack(good)) if good else None, bad
