"""LARS: SGD with a rate of its own for each weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.optimizers import Group
from kfac_bench.config.options import RESULT, option
from kfac_bench.optimizers.sgd import SGDConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass
class LARSConfig(SGDConfig):
    """LARS: SGD with a learning rate for each weight; vectors have the common rate and no decay."""

    is_elementwise: ClassVar[bool] = False

    trust_coefficient: float = option(
        0.001,
        "rate of a weight: this times the norm of the weight over the norm of its gradient",
        RESULT,
        above=0,
    )

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from pytorch_optimizer import LARS

        return LARS(groups, **self.settings(), trust_coefficient=self.trust_coefficient)
