"""What the trainer asks of a data set, and the data set that fits in memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Generator, Tensor

from kfac_bench.data.batch import Batch
from kfac_bench.data.batches import Shard, eval_indices, keyed_generator, train_indices


class Data(Protocol):
    """A training and an evaluation set of examples with targets.

    `shape` is that of one input: (C, H, W) of an image, (tokens,) of a text; `train_size` and
    `eval_size` count examples over all ranks. `num_classes` is the number of logits of an image, or
    of a pixel if the targets are masks; of a text it is the vocabulary's size.
    `notes` are lines for the user: what was left out, by name.
    """

    name: str
    shape: tuple[int, ...]
    num_classes: int
    train_size: int
    eval_size: int
    notes: Sequence[str]

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

        `batch_size` is global and at least the world size (UsageError). An epoch's last batch may
        be smaller, and a rank's part of it empty, unless `drop_last` leaves it out. Batches are
        bit-identical whenever the arguments are, whatever ran before: a resumed run continues
        exactly. Global random state is neither read nor changed.
        """
        ...

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's evaluation batches: every example once over all ranks, no padding.

        Ranks may get different numbers of batches, also none. `batch_size` is global.
        """
        ...


@dataclass(frozen=True)
class Looks:
    """How a person reads the images: with x = (pixel / 255 - mean) / std, by channel, undone.

    Empty: not known. `classes` are names by label; empty: they have none but their numbers.
    """

    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    classes: Sequence[str] = ()


UNKNOWN = Looks()


@runtime_checkable
class Pictured(Protocol):
    """Data that know how their images are to be shown."""

    looks: Looks


class TensorData:
    """Data held in memory, as uint8 (pixels 0..255, scaled to [0, 1] at batch time) or float.

    `train` and `evaluation` are (images [N, C, H, W], int64 labels [N]). A batch is converted to
    float32 and becomes (x - mean) / std with one mean and std per channel, if these are given.
    `augment(images, generator)` maps stored, not yet normalised training images [n, C, H, W]
    to the same shape and dtype; its generator is keyed by (seed, epoch, step, rank) alone.
    `classes` are the labels' names, for people.
    """

    notes: Sequence[str] = ()

    def __init__(
        self,
        name: str,
        train: tuple[Tensor, Tensor],
        evaluation: tuple[Tensor, Tensor],
        num_classes: int,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        classes: Sequence[str] = (),
        augment: Callable[[Tensor, Generator], Tensor] | None = None,
    ) -> None:
        for images, labels in (train, evaluation):
            if images.ndim != 4 or labels.shape != images.shape[:1]:
                raise ValueError(
                    f"images must be [N, C, H, W] and labels [N], "
                    f"got {list(images.shape)} and {list(labels.shape)}"
                )
        channels, height, width = train[0].shape[1:]
        self.name = name
        self.shape: tuple[int, ...] = (channels, height, width)
        self.num_classes = num_classes
        self.train_size = len(train[0])
        self.eval_size = len(evaluation[0])
        self._train = train
        self._evaluation = evaluation
        self.looks = Looks(mean or [0.0] * channels, std or [1.0] * channels, classes)
        self._mean = _per_channel(self.looks.mean)
        self._std = _per_channel(self.looks.std)
        self._augment = augment

    def train(
        self,
        batch_size: int,
        seed: int,
        epoch: int,
        start: int,
        shard: Shard,
        drop_last: bool = True,
    ) -> Iterator[Batch]:
        """Yield this rank's training batches from step `start` on; see Data.train."""
        batches = train_indices(self.train_size, batch_size, seed, epoch, start, shard, drop_last)
        return (
            self._train_batch(indices, (seed, epoch, step, shard.rank))
            for step, indices in enumerate(batches, start)
        )

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's evaluation batches, never augmented; see Data.evaluate."""
        images, labels = self._evaluation
        return (
            (self._normalised(images[indices]), labels[indices])
            for indices in eval_indices(self.eval_size, batch_size, shard)
        )

    def _train_batch(self, indices: Tensor, key: tuple[int, int, int, int]) -> Batch:
        images, labels = self._train
        chosen = images[indices]
        if self._augment is not None and len(chosen):
            chosen = self._augment(chosen, keyed_generator(*key))
        return self._normalised(chosen), labels[indices]

    def _normalised(self, images: Tensor) -> Tensor:
        scale = 255.0 if images.dtype == torch.uint8 else 1.0
        return (images.float() / scale - self._mean) / self._std


def _per_channel(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)
