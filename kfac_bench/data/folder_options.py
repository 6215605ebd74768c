"""Datasets of files, and those that a user brings: folders of images, shards and tables.

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
        from kfac_bench.data.base import tables

        # `datasets` also writes a folder train.
        has_folder = (root / "train").is_dir() or (root / "val").is_dir()
        return has_folder and not tables.is_at(root)

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        from kfac_bench.data.images import imagefolder

        counts, notes, faults = imagefolder.scan(root)
        return "; ".join([by_split(counts, "image"), *notes]), faults


@dataclass
class TableConfig(FilesConfig):
    """A dataset of Parquet or Arrow files, whose splits have names."""

    train_split: str = option("train", "split that is trained on", RESULT)
    eval_split: str | None = option(
        None,
        "split for evaluation; null: validation, or else test, or else a share of train_split",
        RESULT,
    )
    eval_share: float = option(
        0.1,
        "share of train_split for evaluation, if there is no other split",
        RESULT,
        above=0,
        below=1,
    )


@dataclass
class ParquetConfig(TableConfig):
    """Images with labels in Parquet or Arrow files, as Hugging Face's hub and datasets have."""

    has_photographs: ClassVar[bool] = True

    image_column: str | None = option(None, "column of images; null: image or img", RESULT)
    label_column: str | None = option(
        None, "column of labels; null: label, labels or fine_label", RESULT
    )

    def build(self, task: str) -> Data:
        from kfac_bench.data.images import table_images

        options = table_images.TableOptions(
            self.image_column,
            self.label_column,
            self.train_split,
            self.eval_split,
            self.eval_share,
        )
        return table_images.load(
            self.folder(),
            options,
            self.image_size,
            self.workers,
            self.on_error,
            augment=self.auto_augment or self.augment,
        )

    @classmethod
    def is_at(cls, root: Path) -> bool:
        from kfac_bench.data.images import table_images

        return table_images.is_at(root)

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        from kfac_bench.data.images import table_images

        counts, faults = table_images.scan(root)
        return by_split(counts, "good image"), faults


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
