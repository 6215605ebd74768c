"""Shampoo in blocks, as in Google's distributed version."""

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
class ShampooConfig(AdamConfig):
    """Shampoo in blocks; each weight's step is as long as SGD's (grafting).

    ``eps`` is added to Shampoo's matrices.
    """

    is_elementwise: ClassVar[bool] = False
    fits_dtensors: ClassVar[bool] = False

    precondition_freq: int = option(20, "steps between inverse roots", RESULT, at_least=1)
    block_size: int = option(512, "rows of a block, at most", RESULT, at_least=2)

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from pytorch_optimizer import ScalableShampoo

        settings = self.settings()
        return ScalableShampoo(
            groups,
            matrix_eps=settings.pop("eps"),
            start_preconditioning_step=self.precondition_freq,
            preconditioning_compute_steps=self.precondition_freq,
            block_size=self.block_size,
            **settings,
        )
