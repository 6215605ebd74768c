"""EigenAdam: Adam in the eigenbasis of K-FAC's factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kfac_bench.config.optimizers import Group
from kfac_bench.config.options import RESULT, option
from kfac_bench.errors import UsageError
from kfac_bench.optimizers.adam import MomentsConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass
class EigenAdamConfig(MomentsConfig):
    """Adam in the eigenbasis of K-FAC's factors; it also chooses kfac=eigen_adam."""

    is_elementwise: ClassVar[bool] = False

    beta1: float = option(0.8, "decay of the first moment", RESULT, at_least=0, below=1)
    beta2: float = option(0.95, "decay of the second moment", RESULT, at_least=0, below=1)
    orthogonalize: str = option(
        "linear",
        "layers whose updates are orthogonalized: linear (all linear layers but the last) or none",
        RESULT,
        choices=("linear", "none"),
    )
    scale: float = option(3.0, "factor of Adam's direction in the eigenbasis", RESULT, above=0)
    orthogonal_scale: float = option(
        1.0, "root mean square of an orthogonalized update at lr=1", RESULT, above=0
    )
    orthogonal_steps: int = option(3, "Newton-Schulz steps", RESULT, at_least=1)
    update_clip: float | None = option(
        0.03,
        "largest root mean square of a layer's update, times the root of its inputs; null: any",
        RESULT,
        above=0,
    )
    decomposition: str = option(
        "qr",
        "how eigenvectors are updated: one QR step from the last ones (qr), or eigh",
        RESULT,
        choices=("qr", "eigh"),
    )

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from kfac_bench.core.eigen_adam_optimizer import EigenAdam

        return EigenAdam(
            groups,
            **self.settings(),
            orthogonalize=self.orthogonalize,
            scale=self.scale,
            orthogonal_scale=self.orthogonal_scale,
            orthogonal_steps=self.orthogonal_steps,
            update_clip=self.update_clip,
            decomposition=self.decomposition,
        )

    def check(self, config: Any) -> None:
        """See :meth:`Section.check`."""
        super().check(config)
        if not config.kfac.enabled or config.kfac.method != "eigen_adam":
            chosen = f"kfac.method={config.kfac.method}" if config.kfac.enabled else "kfac=none"
            raise UsageError(
                f"optimizer=eigen_adam with {chosen}: the optimizer needs K-FAC's factors; write "
                "kfac=eigen_adam, or with an experiment kfac.method=eigen_adam kfac.damping=null "
                "kfac.kl_clip=null kfac.grafting=false"
            )
