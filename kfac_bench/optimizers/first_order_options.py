"""The first-order optimizers: the options of each, and how it is built from them."""

from __future__ import annotations

import importlib
import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kfac_bench.config.groups import OptimizerConfig, ParameterGroup
from kfac_bench.config.options import RESULT, option
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from kfac_bench.config.train import TrainConfig


@dataclass
class SGDConfig(OptimizerConfig):
    """SGD with momentum."""

    momentum: float = option(0.9, "heavy-ball momentum", RESULT, at_least=0, below=1)
    nesterov: bool = option(False, "Nesterov's variant of momentum", RESULT)

    def build(self, groups: list[ParameterGroup], model: nn.Module) -> Optimizer:
        from torch.optim import SGD

        return SGD(groups, **self.settings())

    def check(self, config: Any) -> None:
        super().check(config)
        if self.nesterov and not self.momentum:
            raise UsageError(
                "optimizer.nesterov=true with optimizer.momentum=0: it is a variant of momentum; "
                "set optimizer.momentum above 0, or optimizer.nesterov=false"
            )

    def settings(self) -> dict[str, Any]:
        """Return the settings that SGD and LARS share."""
        return {
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
        }


@dataclass
class LARSConfig(SGDConfig):
    """LARS: SGD with a learning rate for each weight; vectors have the common rate and no decay."""

    is_elementwise: ClassVar[bool] = False
    fits_dtensors: ClassVar[bool] = False

    trust_coefficient: float = option(
        0.001,
        "rate of a weight: this times the norm of the weight over the norm of its gradient",
        RESULT,
        above=0,
    )

    def build(self, groups: list[ParameterGroup], model: nn.Module) -> Optimizer:
        from pytorch_optimizer import LARS

        return LARS(groups, **self.settings(), trust_coefficient=self.trust_coefficient)


@dataclass
class MuonConfig(SGDConfig):
    """Muon for hidden weights; Adam for vectors, embeddings and the last layer."""

    is_elementwise: ClassVar[bool] = False

    adam_lr: float = option(0.0003, "Adam's learning rate", RESULT, above=0)
    beta1: float = option(0.9, "Adam's decay of the first moment", RESULT, at_least=0, below=1)
    beta2: float = option(0.95, "Adam's decay of the second moment", RESULT, at_least=0, below=1)
    eps: float = option(1e-10, "Adam's, added to the root of the second moment", RESULT, above=0)

    def build(self, groups: list[ParameterGroup], model: nn.Module) -> Optimizer:
        from kfac_bench.optimizers.muon import muon

        return muon(model, params=groups, **self.settings())

    def settings(self) -> dict[str, Any]:
        """Return the keywords of :func:`kfac_bench.muon`."""
        return {
            **super().settings(),
            "adam_lr": self.adam_lr,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
        }


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

    def build(self, groups: list[ParameterGroup], model: nn.Module) -> Optimizer:
        from torch.optim import Adam

        return self.nadam(groups) if self.nesterov else Adam(groups, **self.settings())

    def nadam(self, groups: list[ParameterGroup], **settings: Any) -> Optimizer:
        """Return torch's NAdam with a constant beta1.

        torch's default raises Nesterov's beta1 from half its value during thousands of steps, so
        short runs would be run at half. An infinite ``momentum_decay`` keeps beta1 constant.
        """
        from torch.optim import NAdam

        return NAdam(groups, momentum_decay=math.inf, **self.settings(), **settings)


@dataclass
class AdamWConfig(AdamConfig):
    """AdamW: Adam with decoupled weight decay; with ``nesterov`` it is NAdam with this decay."""

    def build(self, groups: list[ParameterGroup], model: nn.Module) -> Optimizer:
        from torch.optim import AdamW

        if self.nesterov:
            return self.nadam(groups, decoupled_weight_decay=True)
        return AdamW(groups, **self.settings())


@dataclass
class FusedLAMBConfig(MomentsConfig):
    """NVIDIA Apex's LAMB, on GPUs; it always clips the norm of all gradients to 1."""

    fits_dtensors: ClassVar[bool] = False

    def build(self, groups: list[ParameterGroup], model: nn.Module) -> Optimizer:
        try:
            optimizer: Optimizer = _fused_lamb()(groups, **self.settings())
        except RuntimeError as error:  # Apex is installed without its extensions
            raise UsageError(f"optimizer=fused_lamb: {error}") from None
        return optimizer

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        if config.backend.name == "deepspeed":
            raise UsageError(
                "optimizer=fused_lamb does not fit backend=deepspeed, which copies the optimizer; "
                "use backend=ddp or another optimizer"
            )


_SOURCE = "git clone https://github.com/NVIDIA/apex, then build it as its README says"


def _fused_lamb() -> Any:
    """Return Apex's class FusedLAMB.

    Raises:
        UsageError: Apex or the class is missing. The message says what is installed instead.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        raise UsageError(f"NVIDIA Apex is not installed: {_SOURCE}")
    # The package index has an unrelated project named apex. Only NVIDIA's has this folder.
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        raise UsageError(
            "the apex that is installed is another project, which the package index has under "
            f"that name: pip uninstall apex; {_SOURCE}"
        )
    try:
        return importlib.import_module("apex.optimizers").FusedLAMB
    except (ImportError, AttributeError) as error:
        raise UsageError(f"this NVIDIA Apex has no FusedLAMB ({error}): {_SOURCE}") from None


@dataclass
class LAMBConfig(MomentsConfig):
    """LAMB, version 3 of the paper: without bias correction, weight norms up to 10."""

    is_elementwise: ClassVar[bool] = False
    fits_dtensors: ClassVar[bool] = False

    max_grad_norm: float = option(
        1.0,
        "gradients with a larger norm (over all parameters) are scaled down to it; 0: never",
        RESULT,
        at_least=0,
    )

    def build(self, groups: list[ParameterGroup], model: nn.Module) -> Optimizer:
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
