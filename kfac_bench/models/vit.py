"""A small vision transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.models import ModelConfig
from kfac_bench.config.options import RESULT, option

if TYPE_CHECKING:
    from torch import nn


@dataclass
class ViTConfig(ModelConfig):
    """A small vision transformer."""

    tasks: ClassVar[tuple[str, ...]] = ("classification", "denoising")

    patch: int = option(
        4, "side of the square that becomes a token; divides the image's sides", RESULT, at_least=1
    )
    width: int = option(
        64, "width of the residual stream; a block is four times as wide inside", RESULT, at_least=1
    )
    layers: int = option(2, "blocks", RESULT, at_least=1)
    heads: int = option(4, "attention heads; their number divides the width", RESULT, at_least=1)

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        """See :meth:`ModelConfig.build`."""
        from kfac_bench.models.networks.vit import VisionTransformer

        classes = num_classes if task == "classification" else None
        return VisionTransformer(shape, classes, self.patch, self.width, self.layers, self.heads)
