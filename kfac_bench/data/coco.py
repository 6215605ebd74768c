"""Images with boxes and masks of the objects in them, as COCO has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.options import RESULT, option
from kfac_bench.data.files import FilesConfig, by_split

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data
    from kfac_bench.data.base.unreadable import Unreadable


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
        """See :meth:`DataConfig.build`."""
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
        """See :meth:`DataConfig.shape`."""
        return (self.channels, self.image_size, self.max_size), self.num_classes

    @classmethod
    def is_at(cls, root: Path) -> bool:
        """See :meth:`FilesConfig.is_at`."""
        return (root / "annotations").is_dir()

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        """See :meth:`FilesConfig.scan`."""
        from kfac_bench.data.images import coco_dataset

        counts, faults = coco_dataset.scan(root)
        return by_split(counts, "image"), faults
