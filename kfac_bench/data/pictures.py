"""Noisy patches of scikit-image's pictures, to be denoised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.data import DataConfig
from kfac_bench.config.options import RESULT, option

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data


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
        """See :meth:`DataConfig.build`."""
        from kfac_bench.data.images import pictures

        return pictures.load(self.image_size, self.noise)
