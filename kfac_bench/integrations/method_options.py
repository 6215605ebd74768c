"""The options of KFAC in frameworks: what a script's optimizer needs, and their types."""

from collections.abc import Mapping
from typing import Any, TypedDict

from torch.optim import Optimizer

from kfac_bench.core import kfac_options
from kfac_bench.core.build_eigen_adam import KFAC_DEFAULTS
from kfac_bench.core.eigen_adam_optimizer import find_eigen_adam


def options_for(optimizer: Optimizer, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of KFAC; with EigenAdam, what this optimizer needs is the default."""
    defaults = KFAC_DEFAULTS if find_eigen_adam(optimizer) is not None else {}
    return {**defaults, **options}


def keywords_type() -> type:
    """Return the keywords of KFAC as a TypedDict, for programs that read types (LightningCLI).

    It lacks communication backends and layer types: no configuration file can hold objects.
    """
    fields = {"preset": str | None, **kfac_options.types()}
    made: type = TypedDict("KFACKeywords", fields, total=False)  # type: ignore[misc]
    return made
