"""The state of K-FAC on all ranks as one dict, because a framework's checkpoint is one file.

The modules for the frameworks call these functions when a checkpoint is saved or loaded.
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from kfac_bench.core import KFAC


def whole_state(preconditioner: KFAC) -> dict[str, Any] | None:
    """Return what :func:`load_whole_state` needs to continue bit by bit, on rank 0 at least.

    All ranks must call it. If each rank holds everything (one process, or ``comm_opt``), nothing is
    sent and every rank gets the state. Otherwise the ranks send their shards to rank 0, and the
    other ranks get None.
    """
    if preconditioner.holds_whole_state:
        return preconditioner.state_dict()
    shards: list[Any] | None = None
    if preconditioner.collective.rank == 0:
        shards = [None] * preconditioner.collective.world_size
    dist.gather_object(preconditioner.state_dict(shard=True), shards)
    return None if shards is None else {"shards": shards}


def load_whole_state(preconditioner: KFAC, state: Mapping[str, Any]) -> None:
    """Load what :func:`whole_state` returned; every rank must load the same dict.

    The number of ranks and the strategy may have changed.
    """
    preconditioner.load_state_dict(*state.get("shards", [state]))
