"""Adam, and the settings that its relatives share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kfac_bench.config.optimizers import Group, OptimizerConfig
from kfac_bench.config.options import RESULT, option

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass
class MomentsConfig(OptimizerConfig):
    """Options of an optimizer with a first and a second moment."""

    beta1: float = option(0.9, "decay of the first moment", RESULT, at_least=0, below=1)
    beta2: float = option(0.999, "decay of the second moment", RESULT, at_least=0, below=1)
    eps: float = option(1e-8, "added to the root of the second moment", RESULT, above=0)

    def settings(self) -> dict[str, Any]:
        """Return the settings that Adam and its relatives share."""
        return {
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
        }


@dataclass
class AdamConfig(MomentsConfig):
    """Adam; with ``nesterov`` it is NAdam."""

    nesterov: bool = option(
        False, "NAdam: the next step's first moment replaces the present one", RESULT
    )

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from torch.optim import Adam

        return self.nadam(groups) if self.nesterov else Adam(groups, **self.settings())

    def nadam(self, groups: list[Group], **settings: Any) -> Optimizer:
        """Return torch's NAdam with a constant beta1.

        torch's default raises Nesterov's beta1 from half its value during thousands of steps, so
        short runs would be run at half. An infinite ``momentum_decay`` keeps beta1 constant.
        """
        from torch.optim import NAdam

        return NAdam(groups, momentum_decay=math.inf, **self.settings(), **settings)
