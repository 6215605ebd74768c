"""A fully connected autoencoder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.models import ModelConfig
from kfac_bench.config.options import RESULT, option

if TYPE_CHECKING:
    from torch import nn


@dataclass
class AutoencoderConfig(ModelConfig):
    """A deep autoencoder of fully connected layers."""

    tasks: ClassVar[tuple[str, ...]] = ("reconstruction",)

    hidden: list[int] = option(
        [128, 64, 32, 12], "widths down to the code; mirrored on the way up", RESULT
    )
    activation: str = option(
        "tanh", "activation between layers", RESULT, choices=("tanh", "relu", "sigmoid")
    )

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        """See :meth:`ModelConfig.build`."""
        from kfac_bench.models.networks.autoencoder import Autoencoder

        return Autoencoder(math.prod(shape), self.hidden, self.activation)
