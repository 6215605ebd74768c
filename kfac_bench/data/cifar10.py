"""CIFAR-10, read from its archives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.options import RESULT, option
from kfac_bench.data.files import FilesConfig

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data
    from kfac_bench.data.base.unreadable import Unreadable


@dataclass
class CIFAR10Config(FilesConfig):
    """CIFAR-10, read from its archives."""

    num_classes: ClassVar[int] = 10

    image_size: int = option(32, "images are not resized", RESULT, at_least=32, at_most=32)

    def build(self, task: str) -> Data:
        """See :meth:`DataConfig.build`."""
        from kfac_bench.data.images import cifar10

        return cifar10.load(self.folder(), augment=self.augment)

    @classmethod
    def is_at(cls, root: Path) -> bool:
        """See :meth:`FilesConfig.is_at`."""
        from kfac_bench.data.images import cifar10

        return cifar10.is_at(root)

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        """See :meth:`FilesConfig.scan`."""
        from kfac_bench.data.images import cifar10

        data = cifar10.load(root)
        return f"{data.train_size} images to train on, {data.eval_size} to evaluate", []
