"""scikit-learn's handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.data import DataConfig

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data


@dataclass
class DigitsConfig(DataConfig):
    """scikit-learn's 1797 handwritten digits; no download."""

    channels: ClassVar[int] = 1
    num_classes: ClassVar[int] = 10

    def build(self, task: str) -> Data:
        """See :meth:`DataConfig.build`."""
        from kfac_bench.data.images import digits

        # A reconstruction's error is meant in pixels, so its images keep their range.
        return digits.load(self.image_size, normalize=task == "classification")
