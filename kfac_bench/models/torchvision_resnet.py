"""torchvision's ResNets: resnet18, 34, 50, 101 and 152."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.models import ModelConfig

if TYPE_CHECKING:
    from torch import nn


@dataclass
class TorchvisionResNetConfig(ModelConfig):
    """torchvision's ResNet of this name, untrained, for images of any number of channels."""

    usual_data: ClassVar[str | None] = "imagefolder"

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        """See :meth:`ModelConfig.build`."""
        import torchvision
        from torch import nn

        model: nn.Module = torchvision.models.get_model(
            self.name, weights=None, num_classes=num_classes
        )
        if shape[0] != 3:
            # A first convolution of the same size and initialisation, for other channels.
            conv = nn.Conv2d(shape[0], 64, kernel_size=7, stride=2, padding=3, bias=False)
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
            model.conv1 = conv
        return model
