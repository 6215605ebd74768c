"""Brain MRI slices with tumour masks: the LGG segmentation dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.options import RESULT, option
from kfac_bench.data.files import FilesConfig
from kfac_bench.output import counted

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data
    from kfac_bench.data.base.unreadable import Unreadable


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
        """See :meth:`DataConfig.build`."""
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
        """See :meth:`FilesConfig.is_at`."""
        from kfac_bench.data.images import lgg

        return bool(lgg.folders(root))

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        """See :meth:`FilesConfig.scan`."""
        from kfac_bench.data.images import lgg

        volumes, faults = lgg.scan(root)
        slices = sum(len(volume.slices) for volume in volumes)
        return f"{counted(slices, 'good slice')} in {counted(len(volumes), 'volume')}", faults
