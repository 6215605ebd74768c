"""SOAP: Adam in the eigenbasis of Shampoo's statistics."""

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
class SOAPConfig(MomentsConfig):
    """SOAP: Adam in the eigenbasis of Shampoo's statistics.

    The implementation is pytorch_optimizer's, which follows the authors' code: the first step only
    takes statistics and changes no weight, ``beta2`` is also the decay of the statistics, and there
    is no Nesterov momentum. Convolutions are not flattened: each of their four sides has a basis.
    """

    is_elementwise: ClassVar[bool] = False
    fits_dtensors: ClassVar[bool] = False

    precondition_freq: int = option(10, "steps between eigenbases", RESULT, at_least=1)
    max_dim: int = option(
        10000,
        "largest side of a weight that gets an eigenbasis; larger sides keep the standard basis",
        RESULT,
        at_least=1,
    )

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from pytorch_optimizer import SOAP

        return SOAP(
            groups,
            **self.settings(),
            precondition_frequency=self.precondition_freq,
            max_precondition_dim=self.max_dim,
        )
