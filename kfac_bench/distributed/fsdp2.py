"""Options of the backend fsdp2."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.backends import BackendConfig
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from kfac_bench.config.train import TrainConfig
    from kfac_bench.distributed.backend import Backend


@dataclass
class FSDP2Config(BackendConfig):
    """PyTorch's FSDP2: each rank holds a part of every parameter."""

    cuts_weights: ClassVar[bool] = True

    def join(self, device: str) -> AbstractContextManager[Backend]:
        """See :meth:`BackendConfig.join`."""
        from kfac_bench.distributed.backends import fsdp2

        return fsdp2.join(self, device)

    def check(self, config: TrainConfig) -> None:
        """See :meth:`Section.check`."""
        if not config.optimizer.fits_dtensors:
            raise UsageError(
                f"optimizer={config.optimizer.name} does not fit backend=fsdp2, whose ranks hold "
                "parts of weights: this optimizer needs whole ones; use backend=ddp"
            )
