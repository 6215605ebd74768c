"""The image datasets: the options of each, and how it is read and verified.

This file imports no torch, as :mod:`kfac_bench.data.options`, which has the table of all datasets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.groups import DataConfig
from kfac_bench.config.options import RESULT, option
from kfac_bench.errors import UsageError
from kfac_bench.output import counted

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data
    from kfac_bench.data.base.files import Unreadable


@dataclass
class FilesConfig(DataConfig):
    """A dataset that is read from the folder `data.root`."""

    reads_folder: ClassVar[bool] = True
    demo: ClassVar[str] = ""
    """Name in :data:`demo_folder.DEMOS`; empty: the name of the dataset."""

    def folder(self) -> Path:
        """Return ``data.root``; with ``data.root=demo`` make the demo first, if need be.

        Raises:
            UsageError: ``data.root`` is not set, or the demo cannot be written.
        """
        if self.root is None:
            raise UsageError(
                f"data={self.name} is read from disk: set data.root=FOLDER "
                "(data.root=demo makes a small demo)"
            )
        if self.root != "demo":
            return Path(self.root)
        from kfac_bench.data.demo import demo_folder

        return demo_folder.folder(self.demo or self.name)

    @classmethod
    def is_at(cls, root: Path) -> bool:
        """Return whether the folder has this dataset's layout."""
        raise NotImplementedError

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        """Read every file, for ``kfac-data verify``.

        Returns:
            What the folder has, in words, and its faults.

        Raises:
            UsageError: Nothing in the folder can be used.
        """
        raise NotImplementedError


def by_split(counts: Mapping[str, int], noun: str) -> str:
    """Return the number of examples of each split, in words."""
    return ", ".join(f"{counted(n, noun)} in {split}" for split, n in counts.items())


@dataclass
class CIFAR10Config(FilesConfig):
    """CIFAR-10, read from its archives."""

    has_photographs: ClassVar[bool] = True
    num_classes: ClassVar[int] = 10

    image_size: int = option(32, "images are not resized", RESULT, at_least=32, at_most=32)

    def build(self, task: str) -> Data:
        from kfac_bench.data.images import cifar10

        return cifar10.load(self.folder(), augment=self.auto_augment or self.augment)

    @classmethod
    def is_at(cls, root: Path) -> bool:
        from kfac_bench.data.images import cifar10

        return cifar10.is_at(root)

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        from kfac_bench.data.images import cifar10

        data = cifar10.load(root)
        return f"{data.train_size} images to train on, {data.eval_size} to evaluate", []


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
        from kfac_bench.data.images import fashion_mnist

        root = None if self.root is None else self.folder()
        # A reconstruction's error is meant in pixels, so its images keep their range.
        normalize = task == "classification"
        return fashion_mnist.load(root, self.train_images, self.eval_images, normalize)

    @classmethod
    def is_at(cls, root: Path) -> bool:
        from kfac_bench.data.images import fashion_mnist

        return fashion_mnist.is_at(root)

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        from kfac_bench.data.images import fashion_mnist

        return fashion_mnist.scan(root)


@dataclass
class ImageFolderConfig(FilesConfig):
    """Images in folders by class, as ImageNet has them."""

    has_photographs: ClassVar[bool] = True
    demo: ClassVar[str] = "imagenet"

    def build(self, task: str) -> Data:
        from kfac_bench.data.images import imagefolder

        return imagefolder.load(
            self.folder(),
            self.image_size,
            self.workers,
            self.on_error,
            augment=self.auto_augment or self.augment,
        )

    @classmethod
    def is_at(cls, root: Path) -> bool:
        return (root / "train").is_dir() or (root / "val").is_dir()

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        from kfac_bench.data.images import imagefolder

        counts, notes, faults = imagefolder.scan(root)
        return "; ".join([by_split(counts, "image"), *notes]), faults


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


@dataclass
class ShardsConfig(FilesConfig):
    """ImageNet as tar shards, as the webdataset package writes them."""

    has_photographs: ClassVar[bool] = True

    def build(self, task: str) -> Data:
        from kfac_bench.data.images import tar_shards

        return tar_shards.load(
            self.folder(),
            self.image_size,
            self.workers,
            self.on_error,
            augment=self.auto_augment or self.augment,
        )

    @classmethod
    def is_at(cls, root: Path) -> bool:
        return any(root.glob("train-*.tar")) or any(root.glob("val-*.tar"))

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        from kfac_bench.data.images import tar_shards

        counts, faults = tar_shards.scan(root)
        return by_split(counts, "good image"), faults
