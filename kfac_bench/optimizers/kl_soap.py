"""KL-SOAP: Adam in the eigenbasis of KL-Shampoo's factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfac_bench.config.optimizers import Group
from kfac_bench.optimizers.kl_shampoo import KLShampooConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass
class KLSOAPConfig(KLShampooConfig):
    """KL-SOAP; vectors are updated by Adam, convolutions as matrices [out, in * k * k].

    ``beta2`` is the decay of the factors and of the second moments. ``eps`` is added to the root of
    the second moments.
    """

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from kfac_bench.optimizers.algorithms.kl_optimizers import KLSOAP

        return KLSOAP(groups, **self.settings())
