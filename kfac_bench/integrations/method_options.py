"""The options of KFAC in frameworks: what a script's optimizer needs, and their types."""

import inspect
from collections.abc import Mapping
from typing import Any, TypedDict, get_type_hints

from torch.optim import Optimizer

from kfac_bench.core import KFAC
from kfac_bench.core.build_eigen_adam import KFAC_DEFAULTS
from kfac_bench.core.eigen_adam_optimizer import find_eigen_adam


def options_for(optimizer: Optimizer, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of KFAC; with EigenAdam, what this optimizer needs is the default."""
    defaults = KFAC_DEFAULTS if find_eigen_adam(optimizer) is not None else {}
    return {**defaults, **options}


def keywords_type() -> type:
    """Return the keywords of KFAC as a TypedDict, for programs that read types (LightningCLI).

    Communication backends are objects, which no configuration file can hold.
    """
    hints = get_type_hints(KFAC.__init__)
    parameters = inspect.signature(KFAC.__init__).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    left_out = ("collective", "model_parallel", "layer_types")
    fields = {name: hints[name] for name in names if name not in left_out}
    made: type = TypedDict("KFACKeywords", fields, total=False)  # type: ignore[misc]
    return made
