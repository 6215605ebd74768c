"""Patches of scikit-image's pictures, to be classified by picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.data import DataConfig

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data


@dataclass
class PatchesConfig(DataConfig):
    """Patches of scikit-image's 13 pictures, each with its picture as the class."""

    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    channels: ClassVar[int] = 1
    num_classes: ClassVar[int] = 13

    def build(self, task: str) -> Data:
        """See :meth:`DataConfig.build`."""
        from kfac_bench.data.images import pictures

        return pictures.load_labelled(self.image_size)
