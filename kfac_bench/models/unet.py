"""A U-Net, which gives each pixel a logit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.models import ModelConfig
from kfac_bench.config.options import RESULT, option

if TYPE_CHECKING:
    from torch import nn


@dataclass
class UNetConfig(ModelConfig):
    """A U-Net, which gives each pixel a logit."""

    tasks: ClassVar[tuple[str, ...]] = ("segmentation", "denoising")

    width: int = option(
        32, "channels of the first level; each further level has twice as many", RESULT, at_least=1
    )
    depth: int = option(4, "times that the image is halved", RESULT, at_least=1, at_most=10)

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        """See :meth:`ModelConfig.build`."""
        from kfac_bench.models.networks.unet import UNet

        return UNet(shape[0], num_classes, self.width, self.depth)
