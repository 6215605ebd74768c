"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfac_bench.config.optimizers import Group
from kfac_bench.optimizers.adam import AdamConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass
class AdamWConfig(AdamConfig):
    """AdamW: Adam with decoupled weight decay; with ``nesterov`` it is NAdam with this decay."""

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from torch.optim import AdamW

        if self.nesterov:
            return self.nadam(groups, decoupled_weight_decay=True)
        return AdamW(groups, **self.settings())
