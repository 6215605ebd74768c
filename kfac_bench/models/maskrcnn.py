"""Mask R-CNN: torchvision's with a ResNet-50, and a tiny one for demos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.models import ModelConfig
from kfac_bench.config.options import RESULT, option

if TYPE_CHECKING:
    from torch import nn


@dataclass
class TinyMaskRCNNConfig(ModelConfig):
    """A tiny Mask R-CNN, which learns drawn shapes in a minute."""

    tasks: ClassVar[tuple[str, ...]] = ("detection",)

    box_samples: int = option(
        512,
        "boxes of an image that the heads are trained on; at most a quarter of them hold objects",
        RESULT,
        at_least=4,
    )
    detections: int = option(100, "objects found in an image, at most", RESULT, at_least=1)

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        """See :meth:`ModelConfig.build`."""
        from kfac_bench.models.networks.maskrcnn import maskrcnn_tiny

        return maskrcnn_tiny(
            num_classes,
            min_size=shape[1],
            max_size=shape[2],
            box_samples=self.box_samples,
            detections=self.detections,
        )


@dataclass
class MaskRCNNConfig(TinyMaskRCNNConfig):
    """torchvision's Mask R-CNN with a ResNet-50."""

    backbone_weights: str | None = option(
        None,
        "file with the weights of a ResNet-50 (.pth, .safetensors); null: random weights, with "
        "which the model hardly learns",
        RESULT,
    )

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        """See :meth:`ModelConfig.build`."""
        from kfac_bench.models.networks.maskrcnn import maskrcnn_resnet50_fpn

        return maskrcnn_resnet50_fpn(
            num_classes,
            min_size=shape[1],
            max_size=shape[2],
            backbone_weights=self.backbone_weights,
            box_samples=self.box_samples,
            detections=self.detections,
        )
