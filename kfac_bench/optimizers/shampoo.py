"""Shampoo in blocks, as in Google's distributed version."""

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

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from pytorch_optimizer import ScalableShampoo
        from pytorch_optimizer.optimizer.utils.graft import LayerWiseGrafting

        settings = self.settings()
        return ScalableShampoo(
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
