"""Datasets that fit in memory: `InMemory` for tensors of any kind, `LabelledImages` for images."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import UNKNOWN, Data, ImageDisplay, of_tensors
from kfac_bench.data.base.files import Faults
from kfac_bench.data.base.order import Shard, eval_indices, keyed_generator

DRAWS = 3
"""Random numbers that `augment` gets for each example."""


class InMemory(Data):
    """A dataset held in tensors. A batch has the rows of each tensor that belong to its examples.

    Args:
        name: The dataset's name in the configuration.
        train: Tensors [N, ...] of the training set.
        evaluation: Tensors [N, ...] of the evaluation set.
        shape: Shape of one input of the model, after `prepare`.
        num_classes: See `Data`.
        prepare: Makes the model's inputs and targets of a batch, on the batch's device. By default
            the first tensor is the input and the second one the target.
        augment: Changes the first tensor [n, ...] of a training batch at random, and keeps its
            shape and dtype. Its second argument [n, DRAWS] are float64 random numbers in [0, 1).
            They depend only on (seed, epoch, index of the example).
        looks: How to show the images, if the dataset has images.
    """

    def __init__(
        self,
        name: str,
        train: tuple[Tensor, ...],
        evaluation: tuple[Tensor, ...],
        *,
        shape: tuple[int, ...],
        num_classes: int,
        prepare: Callable[[Batch], Batch] | None = None,
        augment: Callable[[Tensor, Tensor], Tensor] | None = None,
        looks: ImageDisplay = UNKNOWN,
    ) -> None:
        self.name, self.shape, self.num_classes = name, shape, num_classes
        self.train_size, self.eval_size = len(train[0]), len(evaluation[0])
        self.faults = Faults()
        self.looks = looks
        self.tokens: Sequence[str] = ()
        self._train, self._evaluation = train, evaluation
        self._prepare, self._augment = prepare, augment

    def training_batches(self, indices: Iterator[Tensor], key: tuple[int, int]) -> Iterator[Batch]:
        """Yield batches, augmented if the dataset has an augmentation."""
        augment = self._augment
        if augment is None:
            return (_rows(self._train, i) for i in indices)
        # Draws of the whole epoch: an example gets the same numbers in a batch of any size.
        shape = (self.train_size, DRAWS)
        draws = torch.rand(shape, dtype=torch.float64, generator=keyed_generator(*key, 0))
        inputs, *targets = self._train
        return ((augment(inputs[i], draws[i]), *_rows(targets, i)) for i in indices)

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's evaluation batches, never augmented; see `Data.evaluate`."""
        batches = eval_indices(self.eval_size, batch_size, shard)
        return (_rows(self._evaluation, i) for i in batches)

    def prepare(self, batch: Batch) -> Batch:
        """Make the inputs and targets of the model; see `Data.prepare`."""
        return batch if self._prepare is None else self._prepare(batch)

    def fingerprint_parts(self, split: str) -> Iterable[bytes]:
        """Yield the integers of the tensors; see `Data.fingerprint_parts`."""
        return of_tensors(self._train if split == "train" else self._evaluation)


def _rows(tensors: Sequence[Tensor], indices: Tensor) -> Batch:
    return tuple(x[indices] for x in tensors)


class Normalize:
    """Map images x [n, C, H, W] to (x - mean) / std in float32; uint8 is scaled to [0, 1] first."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = (
            torch.tensor(v, dtype=torch.float32).view(1, -1, 1, 1) for v in (mean, std)
        )

    def __call__(self, images: Tensor) -> Tensor:
        """Return the normalized images, on the device of `images`."""
        # Only the first batch on a device copies mean and std.
        if self._mean.device != images.device:
            self._mean, self._std = self._mean.to(images.device), self._std.to(images.device)
        scale = 255.0 if images.dtype == torch.uint8 else 1.0
        return (images.float() / scale - self._mean) / self._std


class LabelledImages(InMemory):
    """Images in memory with one label each; `prepare` normalizes the images.

    Args:
        name: The dataset's name in the configuration.
        train: Images [N, C, H, W], uint8 (0 to 255) or float, and int64 labels [N].
        evaluation: The same for evaluation.
        num_classes: Number of classes.
        mean: Mean of each channel; None leaves the pixels as they are. See `Normalize`.
        std: Standard deviation of each channel; None leaves the pixels as they are.
        classes: Names of the labels, for people.
        augment: See `InMemory`.
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
                    "images must be [N, C, H, W] and labels [N], "
                    f"got {list(images.shape)} and {list(labels.shape)}"
                )
        channels, height, width = train[0].shape[1:]
        looks = ImageDisplay(mean or [0.0] * channels, std or [1.0] * channels, classes)
        normalize = Normalize(looks.mean, looks.std)
        super().__init__(
            name,
            train,
            evaluation,
            shape=(channels, height, width),
            num_classes=num_classes,
            prepare=lambda batch: (normalize(batch[0]), *batch[1:]),
            augment=augment,
            looks=looks,
        )
