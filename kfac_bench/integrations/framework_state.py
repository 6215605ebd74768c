"""The common parts of the integrations: the state of K-FAC as one dict, and the options of KFAC.

A framework's checkpoint is one file, so :func:`whole_state` gathers the state of all ranks.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from kfac_bench.core import KFAC
from kfac_bench.core.build_eigen_adam import KFAC_DEFAULTS
from kfac_bench.core.eigen_adam_optimizer import find_eigen_adam
from kfac_bench.core.kfac_options import KFACOptions
from kfac_bench.core.options import types


def whole_state(preconditioner: KFAC) -> dict[str, Any] | None:
    """Return the state that :func:`load_whole_state` needs to continue bit by bit, on rank 0.

    All ranks must call it. If each rank holds everything (one process, or ``comm_opt``), nothing is
    sent and every rank gets the state. Otherwise the ranks send their shards to rank 0, and the
    other ranks get None.

    Raises:
        RuntimeError: K-FAC spans a part of the ranks of the default process group.
    """
    if preconditioner.holds_whole_state:
        return preconditioner.state_dict()
    collective = preconditioner.collective
    if collective.world_size != dist.get_world_size():
        raise RuntimeError(
            "the state of K-FAC over a part of the ranks cannot be gathered: save "
            "preconditioner.state_dict(shard=True) on each rank"
        )
    shards: list[Any] | None = [None] * collective.world_size if collective.rank == 0 else None
    # Rank 0 would unpickle tensors on the GPUs of the ranks that sent them.
    own = tree_map_only(torch.Tensor, torch.Tensor.cpu, preconditioner.state_dict(shard=True))
    dist.gather_object(own, shards)
    return None if shards is None else {"shards": shards}


def load_whole_state(preconditioner: KFAC, state: Mapping[str, Any]) -> None:
    """Load what :func:`whole_state` returned; every rank must load the same dict.

    The number of ranks and the strategy may have changed.
    """
    preconditioner.load_state_dict(*state.get("shards", [state]))


def options_for(optimizer: Optimizer, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of KFAC; with EigenAdam, what this optimizer needs is the default."""
    defaults = KFAC_DEFAULTS if find_eigen_adam(optimizer) is not None else {}
    return {**defaults, **options}


def keywords_type() -> type:
    """Return the keywords of KFAC as a TypedDict, for programs that read types (LightningCLI).

    It lacks communication backends and layer types: no configuration file can hold objects.
    """
    fields = {"preset": str | None, **types(KFACOptions)}
    made: type = TypedDict("KFACKeywords", fields, total=False)  # type: ignore[misc]
    return made
