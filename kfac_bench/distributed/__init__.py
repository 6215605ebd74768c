"""The backends: one file per way to connect the ranks of a run.

This file imports no torch, and only the chosen backend's file is imported. So `kfac-train --help`
stays fast, and Horovod and DeepSpeed must be installed only if they are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kfac_bench.distributed import slurm_rank

if TYPE_CHECKING:
    from kfac_bench.config import BackendConfig
    from kfac_bench.distributed.backend import Backend


@contextmanager
def join(config: BackendConfig, device: str = "auto") -> Iterator[Backend]:
    """Join the other ranks of this run with the backend that `config` names, and leave at exit.

    torchrun, srun and horovodrun start several ranks. A process without a launcher is alone.

    Raises:
        UsageError: If `device`, or a package that the backend needs, is missing.
    """
    slurm_rank.adopt()
    with config.join(device) as backend:
        yield backend
