"""SGD with momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kfac_bench.config.optimizers import Group, OptimizerConfig
from kfac_bench.config.options import RESULT, option
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass
class SGDConfig(OptimizerConfig):
    """SGD with momentum."""

    momentum: float = option(0.9, "heavy-ball momentum", RESULT, at_least=0, below=1)
    nesterov: bool = option(False, "Nesterov's variant of momentum", RESULT)

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        from torch.optim import SGD

        return SGD(groups, **self.settings())

    def check(self, config: Any) -> None:
        """See :meth:`Section.check`."""
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
