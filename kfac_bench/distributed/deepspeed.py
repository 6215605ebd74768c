"""Options of the backend deepspeed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.backends import BackendConfig
from kfac_bench.config.options import RESULT, option
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from kfac_bench.config.train import TrainConfig
    from kfac_bench.distributed.backend import Backend


@dataclass
class DeepSpeedConfig(BackendConfig):
    """DeepSpeed with ZeRO stages 0 to 2."""

    cuts_weights: ClassVar[bool] = True

    zero_stage: int = option(
        1,
        "what ZeRO splits over ranks: 0 nothing, 1 optimizer state, 2 also gradients; K-FAC needs "
        "whole weights, so use backend=fsdp2 instead of stage 3",
        RESULT,
        resumable=True,
        at_least=0,
        at_most=2,
    )

    def join(self, device: str) -> AbstractContextManager[Backend]:
        """See :meth:`BackendConfig.join`."""
        from kfac_bench.distributed.backends import deepspeed

        return deepspeed.join(self, device, self.zero_stage)

    def check(self, config: TrainConfig) -> None:
        """See :meth:`Section.check`."""
        if self.zero_stage and not config.optimizer.is_elementwise:
            raise UsageError(
                f"optimizer={config.optimizer.name} does not fit "
                f"backend.zero_stage={self.zero_stage}: the optimizer needs whole weights, and "
                "ZeRO joins pieces of several weights; set backend.zero_stage=0"
            )
