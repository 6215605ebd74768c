"""The options of KFAC that follow from the optimizer of a framework's script."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from kfac_bench.core.build_eigen_adam import KFAC_DEFAULTS
from kfac_bench.core.eigen_adam_optimizer import find_eigen_adam


def options_for(optimizer: Optimizer, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of KFAC; with EigenAdam, what this optimizer needs is the default."""
    defaults = KFAC_DEFAULTS if find_eigen_adam(optimizer) is not None else {}
    return {**defaults, **options}
