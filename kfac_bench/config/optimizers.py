"""The first-order optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from kfac_bench.config.options import option


@dataclass
class OptimizerConfig:
    """The first-order optimizer, with or without a preconditioner before it."""

    name: str = option(MISSING, "optimizer", choices=("sgd", "adam", "adamw", "fused_lamb"))
    lr: float = option(MISSING, "learning rate", above=0)
    weight_decay: float = option(
        0.0, "L2 penalty (sgd, adam) or decoupled decay (adamw)", at_least=0
    )


@dataclass
class SGDConfig(OptimizerConfig):
    """SGD with momentum."""

    momentum: float = option(0.9, "heavy-ball momentum", at_least=0, below=1)
    nesterov: bool = option(False, "Nesterov's variant")


@dataclass
class AdamConfig(OptimizerConfig):
    """Adam and AdamW."""

    beta1: float = option(0.9, "decay of the first moment", at_least=0, below=1)
    beta2: float = option(0.999, "decay of the second moment", at_least=0, below=1)
    eps: float = option(1e-8, "added to the root of the second moment", above=0)
