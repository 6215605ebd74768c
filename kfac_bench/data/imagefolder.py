"""Images in folders by class, as ImageNet has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.data.files import FilesConfig, by_split

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data
    from kfac_bench.data.base.unreadable import Unreadable


@dataclass
class ImageFolderConfig(FilesConfig):
    """Images in folders by class, as ImageNet has them."""

    demo: ClassVar[str] = "imagenet"

    def build(self, task: str) -> Data:
        """See :meth:`DataConfig.build`."""
        from kfac_bench.data.images import imagefolder

        return imagefolder.load(
            self.folder(), self.image_size, self.workers, self.on_error, augment=self.augment
        )

    @classmethod
    def is_at(cls, root: Path) -> bool:
        """See :meth:`FilesConfig.is_at`."""
        return (root / "train").is_dir() or (root / "val").is_dir()

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        """See :meth:`FilesConfig.scan`."""
        from kfac_bench.data.images import imagefolder

        counts, notes, faults = imagefolder.scan(root)
        return "; ".join([by_split(counts, "image"), *notes]), faults
