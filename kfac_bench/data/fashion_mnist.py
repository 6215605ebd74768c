"""Fashion-MNIST, read from its four idx files."""

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
        """See :meth:`DataConfig.build`."""
        from kfac_bench.data.images import fashion_mnist

        root = None if self.root is None else self.folder()
        # A reconstruction's error is meant in pixels, so its images keep their range.
        normalize = task == "classification"
        return fashion_mnist.load(root, self.train_images, self.eval_images, normalize)

    @classmethod
    def is_at(cls, root: Path) -> bool:
        """See :meth:`FilesConfig.is_at`."""
        from kfac_bench.data.images import fashion_mnist

        return fashion_mnist.is_at(root)

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        """See :meth:`FilesConfig.scan`."""
        from kfac_bench.data.images import fashion_mnist

        return fashion_mnist.scan(root)
