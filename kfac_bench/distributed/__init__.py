"""One file per way to connect the ranks of a run; each is imported only where it is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from kfac_bench.config import BackendConfig
from kfac_bench.distributed import slurm_rank
from kfac_bench.distributed.backend import Backend


@contextmanager
def join(config: BackendConfig, device: str = "auto") -> Iterator[Backend]:
    """Join the other ranks of this run, in the way ``config`` names; leave at exit.

    torchrun, srun and horovodrun start several; a process without them is alone. Raises
    :class:`UsageError` if ``device`` or what the backend needs is not there.
    """
    slurm_rank.adopt()
    module = importlib.import_module(f"kfac_bench.distributed.{config.name}")
    with module.join(config, device) as backend:
        yield backend
