"""Samples read from files by worker processes, in the order of given indices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from kfac_bench.data.batch import Batch
from kfac_bench.errors import UsageError


@dataclass(frozen=True)
class Unreadable:
    """What a worker sends for a bad file: an exception would arrive with a traceback in it."""

    path: str
    reason: str


Sample = tuple[Any, ...] | Unreadable
"""Tensors or numbers of one example."""


def load_batches(
    samples: Dataset[Sample],
    indices: Iterator[Tensor],
    workers: int,
    empty: Batch,
    stack: Callable[[list[Any]], Batch] = default_collate,
) -> Iterator[Batch]:
    """Yield a batch of `samples` per tensor of indices; `workers` processes read ahead (0: none).

    `empty` is the batch of no indices, `stack` makes one of a list of samples. Batches do not
    depend on `workers`. Global random state is neither read nor changed. Raises UsageError naming
    the file where a sample is Unreadable.
    """
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_sampler=(batch.tolist() for batch in indices),
        num_workers=workers,
        collate_fn=partial(_collate, stack),
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # or the loader draws its workers' seed from global state
    )
    for batch in loader:
        if isinstance(batch, Unreadable):
            raise UsageError(f"{batch.path} cannot be read: {batch.reason}")
        yield empty if batch is None else tuple(batch)  # pinning makes a list of it


def _collate(
    stack: Callable[[list[Any]], Batch], samples: list[Sample]
) -> Batch | Unreadable | None:
    if not samples:
        return None
    for sample in samples:
        if isinstance(sample, Unreadable):
            return sample
    return tuple(stack(samples))
