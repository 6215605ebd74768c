"""KL-Shampoo: Shampoo whose factors minimize a Kullback-Leibler divergence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kfac_bench.config.optimizers import Group
from kfac_bench.config.options import RESULT, option
from kfac_bench.optimizers.adam import MomentsConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass
class KLShampooConfig(MomentsConfig):
    """KL-Shampoo; vectors are updated by Adam, convolutions as matrices [out, in * k * k].

    ``beta2`` is the decay of the factors, and of Adam's second moments. ``eps`` is added to the
    roots of the factors' eigenvalues.
    """

    is_elementwise: ClassVar[bool] = False
    fits_dtensors: ClassVar[bool] = False

    nesterov: bool = option(
        False, "mix the gradient into the first moment, as Nesterov's momentum does", RESULT
    )
    precondition_freq: int = option(10, "steps between QR steps of eigenbases", RESULT, at_least=1)
    max_dim: int = option(
        10000, "largest side of a weight that gets an eigenbasis", RESULT, at_least=1
    )

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from kfac_bench.optimizers.algorithms.kl_optimizers import KLShampoo

        return KLShampoo(groups, **self.settings())

    def settings(self) -> dict[str, Any]:
        """Return the settings that KL-Shampoo and KL-SOAP share."""
        return {
            **super().settings(),
            "nesterov": self.nesterov,
            "precondition_freq": self.precondition_freq,
            "max_dim": self.max_dim,
        }
