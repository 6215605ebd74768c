"""The common parts of the integrations: the state of K-FAC as one dict, and the options of KFAC.

A framework's checkpoint is one file, so :func:`whole_state` gathers the state of all ranks.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

import torch.distributed as dist
from torch.optim import Optimizer

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
