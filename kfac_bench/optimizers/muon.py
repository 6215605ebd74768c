"""Muon for hidden weights, Adam for all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kfac_bench.config.optimizers import Group
from kfac_bench.config.options import RESULT, option
from kfac_bench.optimizers.sgd import SGDConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass
class MuonConfig(SGDConfig):
    """Muon for hidden weights; Adam for vectors, embeddings and the last layer."""

    is_elementwise: ClassVar[bool] = False

    adam_lr: float = option(0.0003, "Adam's learning rate", RESULT, above=0)
    beta1: float = option(0.9, "Adam's decay of the first moment", RESULT, at_least=0, below=1)
    beta2: float = option(0.95, "Adam's decay of the second moment", RESULT, at_least=0, below=1)
    eps: float = option(1e-10, "Adam's, added to the root of the second moment", RESULT, above=0)

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from kfac_bench.optimizers.algorithms.muon import muon

        return muon(model, params=groups, **self.settings())

    def settings(self) -> dict[str, Any]:
        """Return the keywords of :func:`kfac_bench.muon`."""
        return {
            **super().settings(),
            "adam_lr": self.adam_lr,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
        }
