"""ImageNet as tar shards, as the webdataset package writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kfac_bench.data.files import FilesConfig, by_split

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data
    from kfac_bench.data.base.unreadable import Unreadable


@dataclass
class ShardsConfig(FilesConfig):
    """ImageNet as tar shards, as the webdataset package writes them."""

    def build(self, task: str) -> Data:
        """See :meth:`DataConfig.build`."""
        from kfac_bench.data.images import tar_shards

        return tar_shards.load(
            self.folder(), self.image_size, self.workers, self.on_error, augment=self.augment
        )

    @classmethod
    def is_at(cls, root: Path) -> bool:
        """See :meth:`FilesConfig.is_at`."""
        return any(root.glob("train-*.tar")) or any(root.glob("val-*.tar"))

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        """See :meth:`FilesConfig.scan`."""
        from kfac_bench.data.images import tar_shards

        counts, faults = tar_shards.scan(root)
        return by_split(counts, "good image"), faults
