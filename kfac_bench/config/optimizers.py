"""The first-order optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from kfac_bench.config.options import RESULT, option

OPTIMIZERS = (
    *("sgd", "adam", "adamw", "lars", "lamb", "fused_lamb"),
    *("muon", "soap", "shampoo"),
)
OF_WHOLE_WEIGHTS = ("lars", "lamb", "muon", "soap", "shampoo")
"""They treat each weight as a whole: what glues pieces of several together is not for them."""


@dataclass
class OptimizerConfig:
    """The first-order optimizer, with or without a preconditioner before it."""

    name: str = option(MISSING, "optimizer", RESULT, choices=OPTIMIZERS)
    lr: float = option(MISSING, "learning rate", RESULT, above=0)
    weight_decay: float = option(
        0.0,
        "L2 penalty (sgd, adam, lars), decoupled decay (adamw), or part of the update (lamb)",
        RESULT,
        at_least=0,
    )
    no_decay: list[str] = option(
        [],
        "regular expressions of parameters, by name or their layer's class, without decay",
        RESULT,
    )


@dataclass
class SGDConfig(OptimizerConfig):
    """SGD with momentum."""

    momentum: float = option(0.9, "heavy-ball momentum", RESULT, at_least=0, below=1)
    nesterov: bool = option(False, "Nesterov's variant", RESULT)


@dataclass
class AdamConfig(OptimizerConfig):
    """Adam and AdamW."""

    beta1: float = option(0.9, "decay of the first moment", RESULT, at_least=0, below=1)
    beta2: float = option(0.999, "decay of the second moment", RESULT, at_least=0, below=1)
    eps: float = option(1e-8, "added to the root of the second moment", RESULT, above=0)


@dataclass
class LARSConfig(SGDConfig):
    """LARS: SGD with a rate for each weight (not for vectors, which get no decay either)."""

    trust_coefficient: float = option(
        0.001, "of a weight's norm over its gradient's: its rate", RESULT, above=0
    )


@dataclass
class LAMBConfig(AdamConfig):
    """LAMB, version 3 of the paper: without bias correction, weight norms up to 10."""

    max_grad_norm: float = option(
        1.0,
        "longer gradients (norm over all parameters) are scaled down; 0: never",
        RESULT,
        at_least=0,
    )


@dataclass
class MuonConfig(SGDConfig):
    """Muon for hidden weights; Adam for vectors, embeddings and the last layer."""

    adam_lr: float = option(0.0003, "Adam's learning rate", RESULT, above=0)
    beta1: float = option(0.9, "Adam's decay of the first moment", RESULT, at_least=0, below=1)
    beta2: float = option(0.95, "Adam's decay of the second moment", RESULT, at_least=0, below=1)
    eps: float = option(1e-10, "Adam's, added to the root of the second moment", RESULT, above=0)


@dataclass
class SOAPConfig(AdamConfig):
    """Adam in the eigenbasis of Shampoo's statistics."""

    precondition_freq: int = option(10, "steps between eigenbases", RESULT, at_least=1)


@dataclass
class ShampooConfig(AdamConfig):
    """Shampoo in blocks, each weight's step as long as SGD's (grafting); eps: of its matrices."""

    precondition_freq: int = option(20, "steps between inverse roots", RESULT, at_least=1)
    block_size: int = option(512, "rows of a block, at most", RESULT, at_least=2)
