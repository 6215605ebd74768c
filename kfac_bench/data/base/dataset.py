"""The interface of every dataset: `Data`, how to show its images, and its fingerprint.

A run that continues notices by the fingerprint that its data changed.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.files import Faults
from kfac_bench.data.base.order import Shard, train_indices

SPLITS = ("train", "eval")


@dataclass(frozen=True)
class ImageDisplay:
    """The display of the images of a dataset, for people.

    A shown pixel is 255 * (x * std + mean), where x is the model's input, by channel.
    """

    mean: Sequence[float] = ()
    """Mean of each channel; empty if unknown."""
    std: Sequence[float] = ()
    """Standard deviation of each channel; empty if unknown."""
    classes: Sequence[str] = ()
    """Names of the labels; empty if a label has only a number."""


UNKNOWN = ImageDisplay()


class Data(ABC):
    """A training set and an evaluation set of examples with targets.

    Attributes:
        name: The dataset's name in the configuration.
        shape: Shape of one input: (C, H, W) of an image, (tokens,) of a text.
        num_classes: Number of logits of an image, or of a pixel if the targets are masks. For text
            the size of the vocabulary.
        train_size: Number of training examples, over all ranks.
        eval_size: Number of evaluation examples, over all ranks.
        faults: Files that cannot be read, and whether batches may lack their examples.
        notes: Lines for the user about data that is not used for another reason.
        looks: How to show the images, if the dataset has images.
    """

    name: str
    shape: tuple[int, ...]
    num_classes: int
    train_size: int
    eval_size: int
    faults: Faults
    notes: Sequence[str] = ()
    looks: ImageDisplay = UNKNOWN

    def train(
        self,
        batch_size: int,
        seed: int,
        epoch: int,
        start: int,
        shard: Shard,
        drop_last: bool = True,
    ) -> Iterator[Batch]:
        """Yield this rank's part of the global batches start, start+1, ... of an epoch.

        Equal arguments give bit-identical batches, whatever ran before, so a resumed run continues
        exactly. Global random state is neither read nor changed.

        Args:
            batch_size: Examples of a global batch; at least the world size (UsageError).
            seed: Seed of the run.
            epoch: Number of the epoch.
            start: First global batch of the epoch to yield.
            shard: This rank among all ranks.
            drop_last: Leave out the last batch of an epoch if it is smaller. Otherwise this rank's
                part of the last batch may be empty.
        """
        indices = train_indices(self.train_size, batch_size, seed, epoch, start, shard, drop_last)
        return self.training_batches(indices, (seed, epoch))

    @abstractmethod
    def training_batches(self, indices: Iterator[Tensor], key: tuple[int, int]) -> Iterator[Batch]:
        """Yield one batch of training examples for each tensor of indices.

        `key` is (seed, epoch). Random numbers for an example must be a function of `key` and the
        index of the example. Where `faults` allows, examples that cannot be read are left out.
        """

    @abstractmethod
    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's evaluation batches: every example once over all ranks, no padding.

        Ranks may get different numbers of batches, or no batch. `batch_size` is global.
        """

    def prepare(self, batch: Batch) -> Batch:
        """Turn a batch of `train` or `evaluate` into what the model takes.

        The trainer calls `prepare` after it has moved the batch to the model's device: the copy of
        uint8 pixels moves a quarter of the bytes of float32 pixels. The default changes nothing.
        """
        return batch

    def fingerprint_parts(self, split: str) -> Iterable[bytes]:
        """Yield bytes that identify the examples of a split, for the fingerprint of the data.

        `split` is one of SPLITS. The bytes are cheap to get and the same wherever the dataset lies:
        names and sizes of files, or an index. The default has no bytes, so that a run that
        continues compares only the numbers of examples.
        """
        return ()


MOST_SIZES = 100_000
"""Files of a split whose sizes are read. On a network disk a size can take a millisecond."""

MOST_COPIED = 64 * 2**20
"""Bytes of a tensor that are copied at once: a tensor may be a file larger than the memory."""

Fingerprint = Mapping[str, Mapping[str, Any]]
"""The number of examples of each split, and a hash that identifies them in their order."""


def fingerprint(data: Data) -> dict[str, dict[str, Any]]:
    """Return the fingerprint of a dataset."""
    result: dict[str, dict[str, Any]] = {}
    for split, examples in zip(SPLITS, (data.train_size, data.eval_size), strict=True):
        digest = hashlib.sha256()
        for part in data.fingerprint_parts(split):
            digest.update(part)
        result[split] = {"examples": examples, "sha256": digest.hexdigest()}
    return result


def difference(before: Fingerprint, now: Fingerprint) -> str | None:
    """Return the differences of two fingerprints as text, or None if they are equal."""
    parts = []
    for split in SPLITS:
        old, new = before.get(split), now.get(split)
        if old == new:
            continue
        if not isinstance(old, Mapping) or not isinstance(new, Mapping):
            parts.append(f"only one of the two has a split {split}")
            continue
        count, now_count = old.get("examples"), new.get("examples")
        if count != now_count:
            parts.append(f"{split} has {now_count} examples, before {count}")
        else:
            parts.append(
                f"{split} has {count} examples as before, but names, sizes or labels changed"
            )
    return "; ".join(parts) or None


def of_files(paths: Sequence[str | Path], root: Path) -> Iterator[bytes]:
    """Yield names below `root` of all files, and the sizes of at most MOST_SIZES of them.

    The files with a size are evenly spread. A missing file has the size -1.
    """
    every = -(-len(paths) // MOST_SIZES) or 1
    for number, path in enumerate(paths):
        name = os.fsencode(os.path.relpath(path, root))
        yield name + b"\0" + (str(_size(path)).encode() if number % every == 0 else b"") + b"\n"


def of_tensors(tensors: Sequence[Tensor]) -> Iterator[bytes]:
    """Yield the types, the shapes and the integers of tensors in memory.

    Floating-point numbers are left out. The program computed them from its own data, and their last
    bits can differ between machines.
    """
    for x in tensors:
        yield f"{x.dtype} {list(x.shape)}\n".encode()
        if not x.is_floating_point():
            content = x.contiguous().view(-1).numpy().view(np.uint8)
            for start in range(0, len(content), MOST_COPIED):
                yield content[start : start + MOST_COPIED].tobytes()


def _size(path: str | Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
