"""The small ResNets for CIFAR: resnet8, 20, 32, 44, 56 and 110."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfac_bench.config.models import ModelConfig

if TYPE_CHECKING:
    from torch import nn


@dataclass
class CifarResNetConfig(ModelConfig):
    """A small ResNet for CIFAR; the name gives the number of layers."""

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        """See :meth:`ModelConfig.build`."""
        from kfac_bench.models.networks.cifar_resnet import cifar_resnet

        return cifar_resnet(int(self.name.removeprefix("resnet")), num_classes, shape[0])
