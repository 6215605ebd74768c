"""The backends: the options of each, and how a rank joins the others.

This file imports no torch. A backend's own file is imported when a run joins its ranks, so Horovod
and DeepSpeed must be installed only if they are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.groups import BackendConfig
from kfac_bench.config.options import RESULT, option
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from kfac_bench.config.train import TrainConfig
    from kfac_bench.distributed.backend import Backend


@dataclass
class DDPConfig(BackendConfig):
    """PyTorch's DistributedDataParallel."""

    def join(self, device: str) -> AbstractContextManager[Backend]:
        from kfac_bench.distributed.backends import ddp

        return ddp.join(self, device)


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
        from kfac_bench.distributed.backends import deepspeed

        return deepspeed.join(self, device, self.zero_stage)

    def check(self, config: TrainConfig) -> None:
        if self.zero_stage and not config.optimizer.is_elementwise:
            raise UsageError(
                f"optimizer={config.optimizer.name} does not fit "
                f"backend.zero_stage={self.zero_stage}: the optimizer needs whole weights, and "
                "ZeRO joins pieces of several weights; set backend.zero_stage=0"
            )


@dataclass
class FSDP2Config(BackendConfig):
    """PyTorch's FSDP2: each rank holds a part of every parameter."""

    cuts_weights: ClassVar[bool] = True

    def join(self, device: str) -> AbstractContextManager[Backend]:
        from kfac_bench.distributed.backends import fsdp2

        return fsdp2.join(self, device)

    def check(self, config: TrainConfig) -> None:
        if not config.optimizer.fits_dtensors:
            raise UsageError(
                f"optimizer={config.optimizer.name} does not fit backend=fsdp2, whose ranks hold "
                "parts of weights: this optimizer needs whole ones; use backend=ddp"
            )


@dataclass
class HorovodConfig(BackendConfig):
    """Horovod."""

    def join(self, device: str) -> AbstractContextManager[Backend]:
        from kfac_bench.distributed.backends import horovod

        return horovod.join(self, device)


CHOICES: Mapping[str, type[BackendConfig]] = {
    "ddp": DDPConfig,
    "deepspeed": DeepSpeedConfig,
    "fsdp2": FSDP2Config,
    "horovod": HorovodConfig,
}
