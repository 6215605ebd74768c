"""The published image datasets: the options of each, and how it is read and verified.

This file imports no torch, as :mod:`kfac_bench.data.options`, which has the table of all datasets.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.groups import DataConfig
from kfac_bench.config.options import RESULT, option
from kfac_bench.data.folder_options import FilesConfig, by_split
from kfac_bench.output import counted

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data
    from kfac_bench.data.base.files import Unreadable
    from kfac_bench.data.images.cifar import CifarDataset
    from kfac_bench.data.images.idx_images import IdxDataset


class _CifarConfig(FilesConfig):
    """CIFAR-10 or CIFAR-100, whose name is that of the choice."""

    def build(self, task: str) -> Data:
        from kfac_bench.data.images import cifar

        augment = self.auto_augment or self.augment
        return cifar.load(self.folder(), self._dataset(), augment=augment)

    @classmethod
    def _dataset(cls) -> CifarDataset:
        from kfac_bench.data.images import cifar

        return cifar.CIFAR10 if cls.num_classes == 10 else cifar.CIFAR100

    @classmethod
    def is_at(cls, root: Path) -> bool:
        from kfac_bench.data.images import cifar

        return cifar.is_at(root, cls._dataset())

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        from kfac_bench.data.images import cifar

        data = cifar.load(root, cls._dataset())
        return f"{data.train_size} images to train on, {data.eval_size} to evaluate", []


@dataclass
class CIFAR10Config(_CifarConfig):
    """CIFAR-10, read from its archives."""

    has_photographs: ClassVar[bool] = True
    num_classes: ClassVar[int] = 10

    image_size: int = option(32, "images are not resized", RESULT, at_least=32, at_most=32)


@dataclass
class CIFAR100Config(CIFAR10Config):
    """CIFAR-100 with its 100 fine classes, read from its archives."""

    num_classes: ClassVar[int] = 100


@dataclass
class COCOConfig(FilesConfig):
    """Images with boxes and masks; ``image_size`` is the shorter side in evaluation."""

    tasks: ClassVar[tuple[str, ...]] = ("detection",)
    num_classes: ClassVar[int] = 81

    max_size: int = option(1333, "largest longer side of an image in pixels", RESULT, at_least=1)
    min_sizes: list[int] = option(
        [],
        "shorter sides in training, of which each epoch draws one for each image; []: image_size",
        RESULT,
    )
    year: int | None = option(None, "year that is used, if a folder has several", RESULT)

    def build(self, task: str) -> Data:
        from kfac_bench.data.images import coco_dataset

        return coco_dataset.load(
            self.folder(),
            self.image_size,
            self.max_size,
            self.workers,
            min_sizes=self.min_sizes,
            augment=self.augment,
            on_error=self.on_error,
            year=self.year,
        )

    def shape(self) -> tuple[tuple[int, ...], int]:
        return (self.channels, self.image_size, self.max_size), self.num_classes

    @classmethod
    def is_at(cls, root: Path) -> bool:
        return (root / "annotations").is_dir()

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        from kfac_bench.data.images import coco_dataset

        counts, faults = coco_dataset.scan(root)
        return by_split(counts, "image"), faults


@dataclass
class DigitsConfig(DataConfig):
    """scikit-learn's 1797 handwritten digits; no download."""

    channels: ClassVar[int] = 1
    num_classes: ClassVar[int] = 10

    def build(self, task: str) -> Data:
        from kfac_bench.data.images import digits

        # A reconstruction's error is meant in pixels, so its images keep their range.
        return digits.load(self.image_size, normalize=task == "classification")


@dataclass
class FashionMNISTConfig(FilesConfig):
    """Fashion-MNIST; without ``data.root`` from Debian's package dataset-fashion-mnist."""

    channels: ClassVar[int] = 1
    num_classes: ClassVar[int] = 10

    image_size: int = option(28, "images are not resized", RESULT, at_least=28, at_most=28)
    train_images: int | None = option(
        None, "number of training images, from the first on; null: all", RESULT, at_least=1
    )
    eval_images: int | None = option(
        None, "number of evaluation images, from the first on; null: all", RESULT, at_least=1
    )

    def build(self, task: str) -> Data:
        from kfac_bench.data.images import idx_images

        has_package = self._dataset() == idx_images.FASHION_MNIST
        root = None if self.root is None and has_package else self.folder()
        # A reconstruction's error is meant in pixels, so its images keep their range.
        normalize = task == "classification"
        return idx_images.load(
            root, self.train_images, self.eval_images, normalize, self._dataset()
        )

    @classmethod
    def _dataset(cls) -> IdxDataset:
        from kfac_bench.data.images import idx_images

        return idx_images.FASHION_MNIST

    @classmethod
    def is_at(cls, root: Path) -> bool:
        from kfac_bench.data.images import idx_images

        return idx_images.is_at(root, cls._dataset())

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        from kfac_bench.data.images import idx_images

        return idx_images.scan(root, cls._dataset())


@dataclass
class MNISTConfig(FashionMNISTConfig):
    """MNIST, handwritten digits; ``kfac-data fetch mnist`` downloads the files."""

    demo: ClassVar[str] = "fashion_mnist"

    @classmethod
    def _dataset(cls) -> IdxDataset:
        from kfac_bench.data.images import idx_images

        return idx_images.MNIST


@dataclass
class LGGConfig(FilesConfig):
    """Brain MRI slices with tumour masks: the LGG segmentation dataset."""

    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)
    num_classes: ClassVar[int] = 1

    eval_share: float = option(
        0.1,
        "share of the patients for evaluation; the same patients for all seeds",
        RESULT,
        above=0,
        below=1,
    )

    def build(self, task: str) -> Data:
        from kfac_bench.data.images import lgg

        return lgg.load(
            self.folder(),
            self.image_size,
            self.workers,
            augment=self.augment,
            eval_share=self.eval_share,
            on_error=self.on_error,
        )

    @classmethod
    def is_at(cls, root: Path) -> bool:
        from kfac_bench.data.images import lgg

        return bool(lgg.folders(root))

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        from kfac_bench.data.images import lgg

        volumes, faults = lgg.scan(root)
        slices = sum(len(volume.slices) for volume in volumes)
        return f"{counted(slices, 'good slice')} in {counted(len(volumes), 'volume')}", faults


@dataclass
class PatchesConfig(DataConfig):
    """Patches of scikit-image's 13 pictures, each with its picture as the class."""

    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    channels: ClassVar[int] = 1
    num_classes: ClassVar[int] = 13

    def build(self, task: str) -> Data:
        from kfac_bench.data.images import pictures

        return pictures.load_labelled(self.image_size)


@dataclass
class PicturesConfig(DataConfig):
    """Noisy patches of scikit-image's pictures; ``image_size`` is the side of a patch."""

    tasks: ClassVar[tuple[str, ...]] = ("denoising",)
    channels: ClassVar[int] = 1
    num_classes: ClassVar[int] = 1

    noise: float = option(
        0.15, "standard deviation of the noise, of pixels in [0, 1]", RESULT, above=0
    )

    def build(self, task: str) -> Data:
        from kfac_bench.data.images import pictures

        return pictures.load(self.image_size, self.noise)
