"""Which example is seen when: a pure function of (seed, epoch, rank, world size)."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_bench.errors import UsageError


@dataclass(frozen=True)
class Shard:
    """One process among those that share the data: 0 <= rank < world_size."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in 0..{self.world_size - 1}")


def mixed_seed(*key: int) -> int:
    """Hash a tuple of integers into a non-negative 63-bit seed; neighbouring keys are unrelated.

    torch's CPU generator looks only at the low 32 bits of a seed and gives similar seeds no
    guarantee, so `seed + epoch` would make run (1, 0) repeat run (0, 1): hash instead.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_generator(*key: int) -> torch.Generator:
    """Return a fresh CPU generator whose stream depends on nothing but `key`."""
    return torch.Generator().manual_seed(mixed_seed(*key))


def epoch_order(size: int, seed: int, epoch: int) -> Tensor:
    """Return the order of one epoch: an int64 permutation [size], the same on every rank."""
    return torch.randperm(size, generator=keyed_generator(seed, epoch))


def steps_per_epoch(size: int, batch_size: int, drop_last: bool = True) -> int:
    """Return the number of global batches in `size` examples; of whole ones, if `drop_last`.

    Raises UsageError if that leaves none.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size must be at least 1, got {batch_size}")
    if not drop_last:
        return -(-size // batch_size)
    if size < batch_size:
        raise UsageError(
            f"batch_size {batch_size} is larger than the training set of {size} examples: "
            "choose a smaller batch_size"
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
    """Yield this rank's int64 indices for steps start, start+1, ...

    `batch_size` is global: rank r takes the r-th consecutive part of each global batch, so the
    union over ranks is the same batch for every world size. Parts differ by one example at most;
    one of an epoch's last batch, smaller unless `drop_last` leaves it out, may be empty.
    Raises UsageError (at the call, not at the first batch) if there are more ranks than examples
    in a batch, or if the batch is larger than the data.
    """
    steps = steps_per_epoch(size, batch_size, drop_last)
    if batch_size < shard.world_size:
        raise UsageError(
            f"batch_size {batch_size} leaves some of the {shard.world_size} ranks without an "
            "example: batch_size is the global batch, choose at least the number of ranks"
        )
    if start < 0:
        raise ValueError(f"start must not be negative, got {start}")
    order = epoch_order(size, seed, epoch)
    batches = (order[step * batch_size : (step + 1) * batch_size] for step in range(start, steps))
    return (batch[_part(len(batch), shard)] for batch in batches)


def _part(size: int, shard: Shard) -> slice:
    """The shard's consecutive part of so many examples."""
    return slice(size * shard.rank // shard.world_size, size * (shard.rank + 1) // shard.world_size)


def eval_indices(size: int, batch_size: int, shard: Shard) -> Iterator[Tensor]:
    """Yield int64 indices such that all ranks together see every example exactly once.

    Nothing is padded or repeated: ranks may get different numbers of batches, a rank may get
    none, and the last batch may be smaller. So no collective may run per evaluation batch.
    `batch_size` is global as in training: a rank's batch has ceil(batch_size / world_size).
    """
    if batch_size < 1:
        raise UsageError(f"batch_size must be at least 1, got {batch_size}")
    local = -(-batch_size // shard.world_size)
    mine = _part(size, shard)
    return (torch.arange(i, min(i + local, mine.stop)) for i in range(mine.start, mine.stop, local))
