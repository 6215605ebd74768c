"""NVIDIA Apex's LAMB, on GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfac_bench.config.optimizers import Group
from kfac_bench.errors import UsageError
from kfac_bench.optimizers.adam import MomentsConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from kfac_bench.config.train import TrainConfig


@dataclass
class FusedLAMBConfig(MomentsConfig):
    """NVIDIA Apex's LAMB, on GPUs; it always clips the norm of all gradients to 1."""

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from kfac_bench.distributed.backends import apex

        fused_lamb = apex.find("apex.optimizers", "FusedLAMB")
        try:
            optimizer: Optimizer = fused_lamb(groups, **self.settings())
        except RuntimeError as error:  # Apex is installed without its extensions
            raise UsageError(f"optimizer=fused_lamb: {error}") from None
        return optimizer

    def check(self, config: TrainConfig) -> None:
        """See :meth:`Section.check`."""
        super().check(config)
        if config.backend.name == "deepspeed":
            raise UsageError(
                "optimizer=fused_lamb does not fit backend=deepspeed, which copies the optimizer; "
                "use backend=ddp or another optimizer"
            )
