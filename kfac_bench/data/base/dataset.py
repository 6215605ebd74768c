"""What the trainer asks of a data set, and the data set that fits in memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.order import Shard, eval_indices, keyed_generator, train_indices
from kfac_bench.data.base.unreadable import Faults


class Data(ABC):
    """A training and an evaluation set of examples with targets.

    `shape` is that of one input: (C, H, W) of an image, (tokens,) of a text; `train_size` and
    `eval_size` count examples over all ranks. `num_classes` is the number of logits of an image, or
    of a pixel if the targets are masks; of a text it is the vocabulary's size.
    `faults` are the files that were left out, and whether batches may lack examples; `notes` are
    lines for the user on what else is not used.
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

        `batch_size` is global and at least the world size (UsageError). An epoch's last batch may
        be smaller, and a rank's part of it empty, unless `drop_last` leaves it out. Batches are
        bit-identical whenever the arguments are, whatever ran before: a resumed run continues
        exactly. Global random state is neither read nor changed.
        """
        indices = train_indices(self.train_size, batch_size, seed, epoch, start, shard, drop_last)
        return self.training_batches(indices, (seed, epoch))

    @abstractmethod
    def training_batches(self, indices: Iterator[Tensor], key: tuple[int, int]) -> Iterator[Batch]:
        """Yield the training examples with these indices, a batch for each tensor of them.

        `key` is (seed, epoch): what is drawn for an example is a function of it and the index.
        Examples that cannot be read are left out where that is allowed (`faults`).
        """

    @abstractmethod
    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's evaluation batches: every example once over all ranks, no padding.

        Ranks may get different numbers of batches, also none. `batch_size` is global.
        """

    def prepare(self, batch: Batch) -> Batch:
        """Make of a batch of `train` or `evaluate` what a model takes, on the batch's device.

        There, because uint8 pixels are a quarter of the floats they become. This one changes
        nothing; classes that derive from Data inherit it.
        """
        return batch


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


DRAWS = 3
"""Random numbers for the augmentation of one image of `TensorData`."""


class TensorData(Data):
    """Data held in memory, as uint8 (pixels 0..255) or float; `prepare` normalises.

    `train` and `evaluation` are (images [N, C, H, W], int64 labels [N]); see `Normalize` for `mean`
    and `std`. `augment(images, draws)` maps stored training images [n, C, H, W] to the same shape
    and dtype; draws [n, DRAWS] are float64 in [0, 1), those of an image a function of (seed, epoch,
    index of the image) alone.
    `classes` are the labels' names, for people.
    """

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
        augment: Callable[[Tensor, Tensor], Tensor] | None = None,
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
        self.faults = Faults()
        self._train = train
        self._evaluation = evaluation
        self.looks = Looks(mean or [0.0] * channels, std or [1.0] * channels, classes)
        self._normalize = Normalize(self.looks.mean, self.looks.std)
        self._augment = augment

    def training_batches(self, indices: Iterator[Tensor], key: tuple[int, int]) -> Iterator[Batch]:
        """Yield (images, labels), augmented."""
        images, labels = self._train
        if self._augment is None:
            return ((images[i], labels[i]) for i in indices)
        augment, generator = self._augment, keyed_generator(*key, 0)
        draws = torch.rand(self.train_size, DRAWS, dtype=torch.float64, generator=generator)
        return ((augment(images[i], draws[i]), labels[i]) for i in indices)

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's evaluation batches, never augmented; see Data.evaluate."""
        images, labels = self._evaluation
        return (
            (images[indices], labels[indices])
            for indices in eval_indices(self.eval_size, batch_size, shard)
        )

    def prepare(self, batch: Batch) -> Batch:
        """Normalise the images."""
        return self._normalize(batch[0]), *batch[1:]


class Normalize:
    """(x - mean) / std by channel of images [n, C, H, W], in float32; uint8 is scaled to [0, 1]."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = (
            torch.tensor(v, dtype=torch.float32).view(1, -1, 1, 1) for v in (mean, std)
        )

    def __call__(self, images: Tensor) -> Tensor:
        """On the images' device."""
        if self._mean.device != images.device:  # once
            self._mean, self._std = self._mean.to(images.device), self._std.to(images.device)
        scale = 255.0 if images.dtype == torch.uint8 else 1.0
        return (images.float() / scale - self._mean) / self._std
