"""CIFAR-10, read from its archives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.data import DataConfig

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data


@dataclass
class CIFAR10Config(DataConfig):
    """CIFAR-10, read from its archives."""

    num_classes: ClassVar[int] = 10

    def build(self, task: str) -> Data:
        """See :meth:`DataConfig.build`."""
        from kfac_bench.data.base.root import root_of
        from kfac_bench.data.images import cifar10

        return cifar10.load(root_of(self), augment=self.augment)
