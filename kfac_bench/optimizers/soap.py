"""SOAP: Adam in the eigenbasis of Shampoo's statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.optimizers import Group
from kfac_bench.config.options import RESULT, option
from kfac_bench.optimizers.adam import AdamConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass
class SOAPConfig(AdamConfig):
    """SOAP: Adam in the eigenbasis of Shampoo's statistics."""

    is_elementwise: ClassVar[bool] = False
    fits_dtensors: ClassVar[bool] = False

    precondition_freq: int = option(10, "steps between eigenbases", RESULT, at_least=1)

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from pytorch_optimizer import SOAP

        return SOAP(groups, **self.settings(), precondition_frequency=self.precondition_freq)
