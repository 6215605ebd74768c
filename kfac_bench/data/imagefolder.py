"""Folders of JPEG files in the layout of ImageNet, decoded and augmented by worker processes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from kfac_bench.data.batch import Batch
from kfac_bench.data.batches import Shard, eval_indices, mixed_seed, train_indices
from kfac_bench.data.data import Data, Looks
from kfac_bench.data.loader import Sample, Unreadable, load_batches
from kfac_bench.errors import UsageError

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
EVAL_RESIZE = 256 / 224
"""The shorter side of an evaluation image before the centre crop, in units of the crop."""


def load(root: Path, image_size: int = 224, workers: int = 4) -> Data:
    """Open `root/train/<class>/*.JPEG` and `root/val/<class>/*.JPEG`; [3, size, size].

    Training images are cropped and resized at random and flipped; evaluation images are resized
    and cropped in the centre; both get ImageNet's mean and std. `workers` processes per rank
    decode ahead (0: this process decodes, same batches). Raises UsageError for a missing
    folder, classes that differ between train and val, and, while iterating, a corrupt image.
    """
    if image_size < 1 or workers < 0:
        raise UsageError(
            f"image_size must be at least 1 and workers at least 0, got {image_size} and {workers}"
        )
    return _ImageFolders(
        _open(root, "train"), _open(root, "val"), image_size=image_size, workers=workers
    )


def _open(root: Path, split: str) -> Any:
    folder = root / split
    if not folder.is_dir():
        raise UsageError(f"no folder {folder}: expected {folder}/<class>/<image>.JPEG")
    try:
        return ImageFolder(str(folder))
    except FileNotFoundError as error:  # no classes, or a class without images
        reason = " ".join(str(error).split())
        raise UsageError(
            f"images are missing: {reason}; expected {folder}/<class>/<image>.JPEG"
        ) from error


def scan(root: Path) -> tuple[dict[str, int], list[tuple[Path, str]]]:
    """Decode every image: how many are good in `train` and `val`, and (file, fault) of the others.

    Raises UsageError as :func:`load` does.
    """
    splits = {split: _open(root, split) for split in ("train", "val")}
    _check_classes(*splits.values())
    counts: dict[str, int] = {}
    faults: list[tuple[Path, str]] = []
    for split, folder in splits.items():
        read = (_decode(folder, path) for path, _ in folder.samples)
        bad = [(Path(x.path), x.reason) for x in read if isinstance(x, Unreadable)]
        faults += bad
        counts[split] = len(folder) - len(bad)
    return counts, faults


def _decode(folder: Any, path: str) -> Any:
    """An RGB image, or why there is none."""
    try:
        return folder.loader(path)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return Unreadable(path, " ".join(str(error).split()))


class _Samples(Dataset[Sample]):
    """Transformed images of one folder; sample (key, i) is a pure function of the key and i."""

    def __init__(self, folder: Any, transform: Any, key: tuple[int, ...]) -> None:
        self.folder = folder
        self.transform = transform
        self.key = key

    def __getitem__(self, index: int) -> Sample:
        path, label = self.folder.samples[index]
        image = _decode(self.folder, path)
        if isinstance(image, Unreadable):
            return image
        # transforms draw from torch's global CPU generator and cannot be given another one; CUDA
        # generators are left alone, which torch.manual_seed would not do
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(mixed_seed(*self.key, index))
            return self.transform(image), label


class _ImageFolders:
    """A pair of folders as `Data`; every epoch starts its own workers, which end with it."""

    def __init__(self, train: Any, evaluation: Any, image_size: int, workers: int) -> None:
        _check_classes(train, evaluation)
        self.name = "imagefolder"
        self.shape: tuple[int, ...] = (3, image_size, image_size)
        self.num_classes = len(train.classes)
        self.train_size = len(train)
        self.eval_size = len(evaluation)
        self.notes: Sequence[str] = ()
        self.looks = Looks(MEAN, STD, train.classes)
        self._train = train
        self._evaluation = evaluation
        self._workers = workers
        finish = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        self._train_transform = v2.Compose(
            [v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip(), *finish]
        )
        self._eval_transform = v2.Compose(
            [v2.Resize(round(image_size * EVAL_RESIZE)), v2.CenterCrop(image_size), *finish]
        )

    def train(
        self,
        batch_size: int,
        seed: int,
        epoch: int,
        start: int,
        shard: Shard,
        drop_last: bool = True,
    ) -> Iterator[Batch]:
        """Yield this rank's training batches from step `start` on; skipped ones are not read.

        The augmentation of an image depends on (seed, epoch, index of the image) alone.
        """
        indices = train_indices(self.train_size, batch_size, seed, epoch, start, shard, drop_last)
        return self._batches(_Samples(self._train, self._train_transform, (seed, epoch)), indices)

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's evaluation batches; see Data.evaluate."""
        indices = eval_indices(self.eval_size, batch_size, shard)
        return self._batches(_Samples(self._evaluation, self._eval_transform, ()), indices)

    def _batches(self, samples: _Samples, indices: Iterator[Tensor]) -> Iterator[Batch]:
        empty = torch.empty(0, *self.shape), torch.empty(0, dtype=torch.int64)
        return load_batches(samples, indices, self._workers, empty)


def _check_classes(train: Any, evaluation: Any) -> None:
    only_train = sorted(set(train.classes) - set(evaluation.classes))
    only_val = sorted(set(evaluation.classes) - set(train.classes))
    if only_train or only_val:
        raise UsageError(
            "train and val must have the same class folders: "
            f"{_listed(only_train)} only in {train.root}, {_listed(only_val)} only in "
            f"{evaluation.root}"
        )


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
