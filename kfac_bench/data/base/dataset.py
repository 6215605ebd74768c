"""The interface of every dataset: `Data`, and how to show its images: `Looks`."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.order import Shard, train_indices
from kfac_bench.data.base.unreadable import Faults

SPLITS = ("train", "eval")


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
    """

    name: str
    shape: tuple[int, ...]
    num_classes: int
    train_size: int
    eval_size: int
    faults: Faults
    notes: Sequence[str] = ()

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

    def contents(self, split: str) -> Iterable[bytes]:
        """Yield bytes that identify the examples of a split, for the fingerprint of the data.

        `split` is one of SPLITS. The bytes are cheap to get and the same wherever the dataset lies:
        names and sizes of files, or an index. The default has no bytes, so that a run that
        continues compares only the numbers of examples.
        """
        return ()


@dataclass(frozen=True)
class Looks:
    """How to show the images of a dataset to a person.

    A shown pixel is 255 * (x * std + mean), where x is the model's input, by channel.
    """

    mean: Sequence[float] = ()
    """By channel; empty if unknown."""
    std: Sequence[float] = ()
    """By channel; empty if unknown."""
    classes: Sequence[str] = ()
    """Names of the labels; empty if a label has only a number."""


UNKNOWN = Looks()


@runtime_checkable
class Pictured(Protocol):
    """Data that knows how to show its images."""

    looks: Looks
