"""Adam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kfac_bench.config.optimizers import Group, OptimizerConfig
from kfac_bench.config.options import RESULT, option

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass
class AdamConfig(OptimizerConfig):
    """Adam."""

    beta1: float = option(0.9, "decay of the first moment", RESULT, at_least=0, below=1)
    beta2: float = option(0.999, "decay of the second moment", RESULT, at_least=0, below=1)
    eps: float = option(1e-8, "added to the root of the second moment", RESULT, above=0)

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from torch.optim import Adam

        return Adam(groups, **self.settings())

    def settings(self) -> dict[str, Any]:
        """Return the settings that Adam and its relatives share."""
        return {
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
        }
