"""The order in which a run sees its examples: a pure function of (seed, epoch, rank, world size).

Every dataset takes its indices from here. Nothing in this file reads data.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_bench.errors import UsageError


@dataclass(frozen=True)
class Shard:
    """The part of the data that one process reads: part `rank` of `world_size` equal parts."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in 0..{self.world_size - 1}")


def mixed_seed(*key: int) -> int:
    """Hash a tuple of integers into a non-negative 63-bit seed.

    Seeds of neighbouring keys are unrelated. With `seed + epoch` instead of a hash, the run
    (seed 1, epoch 0) would repeat the run (seed 0, epoch 1). torch's CPU generator uses only the
    low 32 bits of a seed, and promises nothing for seeds that are close to each other.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_generator(*key: int) -> torch.Generator:
    """Return a new CPU generator whose random numbers depend on `key` alone."""
    return torch.Generator().manual_seed(mixed_seed(*key))


def epoch_order(size: int, seed: int, epoch: int) -> Tensor:
    """Return the order of one epoch: an int64 permutation [size], the same on every rank."""
    return torch.randperm(size, generator=keyed_generator(seed, epoch))


def steps_per_epoch(size: int, batch_size: int, drop_last: bool = True) -> int:
    """Return the number of global batches in `size` examples.

    With `drop_last` only full batches count.

    Raises:
        UsageError: `batch_size` is below 1, or `drop_last` leaves no batch.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size must be at least 1, got {batch_size}")
    if not drop_last:
        return -(-size // batch_size)
    if size < batch_size:
        raise UsageError(
            f"trainer.batch_size={batch_size} is larger than the training set of {size} examples. "
            "Set a smaller batch size, or trainer.drop_last=false"
        )
    return size // batch_size


def train_indices(
    size: int,
    batch_size: int,
    seed: int,
    epoch: int,
    start: int,
    shard: Shard,
    drop_last: bool = True,
) -> Iterator[Tensor]:
    """Yield the int64 indices of this rank for the steps start, start+1, ...

    `batch_size` is global: rank r takes the r-th consecutive part of each global batch. So all
    ranks together see the same batch for every world size. The parts differ by at most one
    example. Without `drop_last` the last batch of an epoch may be smaller, and a rank's part of
    it may be empty.

    Raises:
        UsageError: A batch has fewer examples than there are ranks, or is larger than the
            dataset. The call itself raises, not the first batch.
    """
    steps = steps_per_epoch(size, batch_size, drop_last)
    if batch_size < shard.world_size:
        raise UsageError(
            f"batch_size {batch_size} leaves some of the {shard.world_size} ranks without an "
            "example. The batch is shared by all ranks: choose at least one example per rank"
        )
    if start < 0:
        raise ValueError(f"start must not be negative, got {start}")
    order = epoch_order(size, seed, epoch)
    batches = (order[step * batch_size : (step + 1) * batch_size] for step in range(start, steps))
    return (batch[_part(len(batch), shard)] for batch in batches)


def _part(size: int, shard: Shard) -> slice:
    """Return the consecutive part of `size` examples that belongs to the shard."""
    return slice(size * shard.rank // shard.world_size, size * (shard.rank + 1) // shard.world_size)


def eval_indices(size: int, batch_size: int, shard: Shard) -> Iterator[Tensor]:
    """Yield int64 indices such that all ranks together see every example exactly once.

    No example is repeated for padding. So ranks may get different numbers of batches, a rank may
    get no batch, and the last batch may be smaller: never run a collective per evaluation batch.
    `batch_size` is global as in training: a rank's batch has ceil(batch_size / world_size)
    examples.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size must be at least 1, got {batch_size}")
    local = -(-batch_size // shard.world_size)
    mine = _part(size, shard)
    return (torch.arange(i, min(i + local, mine.stop)) for i in range(mine.start, mine.stop, local))
