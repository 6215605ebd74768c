"""Options of the backend apex."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfac_bench.config.backends import BackendConfig

if TYPE_CHECKING:
    from kfac_bench.distributed.backend import Backend


@dataclass
class ApexConfig(BackendConfig):
    """NVIDIA Apex's DistributedDataParallel."""

    def join(self, device: str) -> AbstractContextManager[Backend]:
        """See :meth:`BackendConfig.join`."""
        from kfac_bench.distributed.backends import apex

        return apex.join(self, device)
