"""LAMB on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.optimizers import Group
from kfac_bench.config.options import RESULT, option
from kfac_bench.optimizers.adam import MomentsConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass
class LAMBConfig(MomentsConfig):
    """LAMB, version 3 of the paper: without bias correction, weight norms up to 10."""

    is_elementwise: ClassVar[bool] = False

    max_grad_norm: float = option(
        1.0,
        "gradients with a larger norm (over all parameters) are scaled down to it; 0: never",
        RESULT,
        at_least=0,
    )

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from pytorch_optimizer import Lamb

        return Lamb(
            groups,
            **self.settings(),
            weight_decouple=False,
            pre_norm=self.max_grad_norm > 0,
            max_grad_norm=self.max_grad_norm,
            # Without this the first steps are 1 / (1 - beta1) times too long.
            adam_debias=True,
        )
