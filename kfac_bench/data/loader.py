"""Samples read from files by worker processes, in the order of given indices."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from kfac_bench.data.batch import Batch
from kfac_bench.data.faults import Faults, Unreadable

Sample = tuple[Any, ...] | Unreadable
"""Tensors or numbers of one example."""


def load_batches(
    samples: Dataset[Sample], indices: Iterator[Tensor], workers: int, empty: Batch, faults: Faults
) -> Iterator[Batch]:
    """Yield a batch of `samples` per tensor of indices; `workers` processes read ahead (0: none).

    `empty` is the batch of no indices. Batches do not depend on `workers`. Global random state is
    neither read nor changed. A sample that is Unreadable is noted in `faults`, which raises
    UsageError or lets the batch go on without it.
    """
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_sampler=(batch.tolist() for batch in indices),
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # or the loader draws its workers' seed from global state
    )
    for batch, bad in loader:
        for fault in bad:
            faults.add(fault)
        yield empty if batch is None else tuple(batch)  # pinning makes a list of it


def _collate(samples: list[Sample]) -> tuple[Batch | None, list[Unreadable]]:
    bad = [sample for sample in samples if isinstance(sample, Unreadable)]
    good = [sample for sample in samples if not isinstance(sample, Unreadable)]
    return tuple(default_collate(good)) if good else None, bad
