"""Options of the backend ddp."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfac_bench.config.backends import BackendConfig

if TYPE_CHECKING:
    from kfac_bench.distributed.backend import Backend


@dataclass
class DDPConfig(BackendConfig):
    """PyTorch's DistributedDataParallel."""

    def join(self, device: str) -> AbstractContextManager[Backend]:
        """See :meth:`BackendConfig.join`."""
        from kfac_bench.distributed.backends import ddp

        return ddp.join(self, device)
