"""The backends: one file per way to connect the ranks of a run.

This file imports no torch, and only the chosen backend's file is imported. So `kfac-train --help`
stays fast, and Horovod and DeepSpeed must be installed only if they are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kfac_bench.distributed import slurm_rank
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from kfac_bench.config import BackendConfig
    from kfac_bench.distributed.backend import Backend


@contextmanager
def join(config: BackendConfig, device: str = "auto") -> Iterator[Backend]:
    """Join the other ranks of this run with the backend that `config` names, and leave at exit.

    torchrun, srun and horovodrun start several ranks. A process without a launcher is alone.

    Raises:
        UsageError: `device`, or a package that the backend needs, is missing, or the launcher is
            that of another backend.
    """
    slurm_rank.adopt()
    with config.join(device) as backend:
        found, started = backend.ranks.world_size, slurm_rank.launched_ranks()
        if found < started:
            raise UsageError(
                f"the launcher has started {started} ranks, but backend={config.name} finds only "
                f"{found}: use horovodrun with backend=horovod, and torchrun with other backends"
            )
        yield backend
