"""The optimizers: a table of all, and the options of those that use matrices of statistics.

:mod:`kfac_bench.optimizers.first_order_options` has the options of the others. Both files import
no torch: ``kfac-train --help`` and the completion read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kfac_bench.config.groups import OptimizerConfig, ParameterGroup
from kfac_bench.config.kfac import option_of_core
from kfac_bench.config.options import RESULT, option
from kfac_bench.core.kfac_options import EIGEN_ADAM_BETAS, EIGEN_ADAM_OPTIONS
from kfac_bench.errors import UsageError
from kfac_bench.optimizers.first_order_options import (
    AdamConfig,
    AdamWConfig,
    FusedLAMBConfig,
    LAMBConfig,
    LARSConfig,
    MomentsConfig,
    MuonConfig,
    SGDConfig,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


BETA1, BETA2 = EIGEN_ADAM_BETAS


def _own(name: str) -> Any:
    return option_of_core(name, table=EIGEN_ADAM_OPTIONS)


@dataclass
class EigenAdamConfig(MomentsConfig):
    """Adam in the eigenbasis of K-FAC's factors; it also chooses kfac=eigen_adam."""

    is_elementwise: ClassVar[bool] = False

    beta1: float = option(BETA1, "decay of the first moment", RESULT, at_least=0, below=1)
    beta2: float = option(BETA2, "decay of the second moment", RESULT, at_least=0, below=1)
    orthogonalize: str = _own("orthogonalize")
    scale: float = _own("scale")
    orthogonal_scale: float = _own("orthogonal_scale")
    orthogonal_steps: int = _own("orthogonal_steps")
    update_clip: float | None = _own("update_clip")
    decomposition: str = _own("decomposition")

    def build(self, groups: list[ParameterGroup], model: nn.Module) -> Optimizer:
        from kfac_bench.core.eigen_adam_optimizer import EigenAdam

        return EigenAdam(groups, **self.settings())

    def settings(self) -> dict[str, Any]:
        """Return the keywords of EigenAdam."""
        return super().settings() | {name: getattr(self, name) for name in EIGEN_ADAM_OPTIONS}

    def check(self, config: Any) -> None:
        super().check(config)
        if not config.kfac.enabled or config.kfac.method != "eigen_adam":
            chosen = f"kfac.method={config.kfac.method}" if config.kfac.enabled else "kfac=none"
            raise UsageError(
                f"optimizer=eigen_adam with {chosen}: the optimizer needs K-FAC's factors; write "
                "kfac=eigen_adam, or with an experiment kfac.method=eigen_adam kfac.damping=null "
                "kfac.kl_clip=null kfac.trust_ratio=null kfac.grafting=false"
            )


@dataclass
class ShampooConfig(MomentsConfig):
    """Shampoo in blocks; each weight's step is as long as that of another optimizer (grafting).

    ``eps`` is added to Shampoo's matrices. ``beta2`` is the decay of these matrices and of the
    second moments that ``grafting=rmsprop`` uses. Neither has a bias correction: the first steps of
    ``rmsprop`` are 1 / sqrt(1 - beta2) times as long as Adam's, so give it a warm-up and a beta2 of
    about 0.95. With ``sqrtn`` an entry moves by about the rate, as with Adam, and no warm-up is
    needed. The momentum is a sum, not an average, so a step is up to 1 / (1 - beta1) times longer.

    Until step ``precondition_freq`` the optimizer whose length is used trains alone.
    """

    is_elementwise: ClassVar[bool] = False
    fits_dtensors: ClassVar[bool] = False

    nesterov: bool = option(True, "Nesterov's variant of momentum", RESULT)
    grafting: str = option(
        "sgd",
        "optimizer whose length each weight's step has; sqrtn: the gradient's signs; none: no "
        "scaling",
        RESULT,
        choices=("sgd", "adagrad", "rmsprop", "sqrtn", "none"),
    )
    root: int = option(
        0,
        "p of the inverse p-th roots of Shampoo's matrices; 0: twice the number of a weight's "
        "sides (4 for a matrix); 2 is the root that KL-Shampoo and SOAP build on",
        RESULT,
        at_least=0,
    )
    precondition_freq: int = option(20, "steps between inverse roots", RESULT, at_least=1)
    block_size: int = option(512, "rows of a block, at most", RESULT, at_least=2)
    merge_dims: bool = option(
        True,
        "merge neighbouring sides of a weight while their product is at most block_size; weights "
        "with at most block_size entries are then not preconditioned",
        RESULT,
    )

    def build(self, groups: list[ParameterGroup], model: nn.Module) -> Optimizer:
        from pytorch_optimizer.optimizer.utils.graft import LayerWiseGrafting

        from kfac_bench.optimizers.shampoo import Shampoo

        settings = self.settings()
        return Shampoo(
            groups,
            matrix_eps=settings.pop("eps"),
            start_preconditioning_step=self.precondition_freq,
            preconditioning_compute_steps=self.precondition_freq,
            block_size=self.block_size,
            shape_interpretation=self.merge_dims,
            inverse_exponent_override=self.root,
            graft_type=LayerWiseGrafting[self.grafting.upper()],
            nesterov=self.nesterov,
            **settings,
        )


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

    def build(self, groups: list[ParameterGroup], model: nn.Module) -> Optimizer:
        from pytorch_optimizer import SOAP

        return SOAP(
            groups,
            **self.settings(),
            precondition_frequency=self.precondition_freq,
            max_precondition_dim=self.max_dim,
        )


CHOICES: dict[str, type[OptimizerConfig]] = {
    "adam": AdamConfig,
    "adamw": AdamWConfig,
    "eigen_adam": EigenAdamConfig,
    "fused_lamb": FusedLAMBConfig,
    "lamb": LAMBConfig,
    "lars": LARSConfig,
    "muon": MuonConfig,
    "sgd": SGDConfig,
    "shampoo": ShampooConfig,
    "soap": SOAPConfig,
}
