"""Muon for hidden weights, Adam for all others."""

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
class MuonConfig(SGDConfig):
    """Muon for hidden weights; Adam for vectors, embeddings and the last layer."""

    is_elementwise: ClassVar[bool] = False

    adam_lr: float = option(0.0003, "Adam's learning rate", RESULT, above=0)
    beta1: float = option(0.9, "Adam's decay of the first moment", RESULT, at_least=0, below=1)
    beta2: float = option(0.95, "Adam's decay of the second moment", RESULT, at_least=0, below=1)
    eps: float = option(1e-10, "Adam's, added to the root of the second moment", RESULT, above=0)

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from pytorch_optimizer import Muon
        from torch import nn

        weights = [
            (module, p)
            for module in model.modules()
            for name, p in module.named_parameters(recurse=False)
            if name == "weight" and p.ndim > 1
        ]
        # Muon orthogonalizes the update of a matrix between hidden layers. Embeddings and the last
        # layer are matrices, too, but learn better with Adam, as its authors found.
        for_adam = {id(p) for module, p in weights if isinstance(module, nn.Embedding)}
        for_adam |= {id(p) for _, p in weights[-1:]}
        split: list[Group] = []
        for group in groups:
            decay = group.get("weight_decay", self.weight_decay)
            # A class token [1, 1, d] or positions [1, n, d] have one row: they are vectors.
            hidden = [
                p for p in group["params"] if p.ndim > 1 and len(p) > 1 and id(p) not in for_adam
            ]
            taken = {id(p) for p in hidden}
            rest = [p for p in group["params"] if id(p) not in taken]
            muon = {"lr": self.lr, "momentum": self.momentum, "nesterov": self.nesterov}
            adam = {"lr": self.adam_lr, "betas": (self.beta1, self.beta2), "eps": self.eps}
            split.append({"params": hidden, "use_muon": True, "weight_decay": decay, **muon})
            split.append({"params": rest, "use_muon": False, "weight_decay": decay, **adam})
        return Muon([group for group in split if group["params"]])
