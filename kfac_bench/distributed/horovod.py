"""Options of the backend horovod."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfac_bench.config.backends import BackendConfig

if TYPE_CHECKING:
    from kfac_bench.distributed.backend import Backend


@dataclass
class HorovodConfig(BackendConfig):
    """Horovod."""

    def join(self, device: str) -> AbstractContextManager[Backend]:
        """See :meth:`BackendConfig.join`."""
        from kfac_bench.distributed.backends import horovod

        return horovod.join(self, device)
