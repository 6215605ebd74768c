"""NVIDIA Apex's LAMB, on GPUs."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfac_bench.config.optimizers import Group
from kfac_bench.errors import UsageError
from kfac_bench.optimizers.adam import MomentsConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from kfac_bench.config.train import TrainConfig

_SOURCE = "git clone https://github.com/NVIDIA/apex, then build it as its README says"


@dataclass
class FusedLAMBConfig(MomentsConfig):
    """NVIDIA Apex's LAMB, on GPUs; it always clips the norm of all gradients to 1."""

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """See :meth:`OptimizerConfig.build`."""
        try:
            optimizer: Optimizer = _fused_lamb()(groups, **self.settings())
        except RuntimeError as error:  # Apex is installed without its extensions
            raise UsageError(f"optimizer=fused_lamb: {error}") from None
        return optimizer

    def check(self, config: TrainConfig) -> None:
        """See :meth:`Section.check`."""
        super().check(config)
        if config.backend.name == "deepspeed":
            raise UsageError(
                "optimizer=fused_lamb does not fit backend=deepspeed, which copies the optimizer; "
                "use backend=ddp or another optimizer"
            )


def _fused_lamb() -> Any:
    """Return Apex's class FusedLAMB.

    Raises:
        UsageError: Apex or the class is missing. The message says what is installed instead.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        raise UsageError(f"NVIDIA Apex is not installed: {_SOURCE}")
    # The package index has an unrelated project named apex. Only NVIDIA's has this folder.
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        raise UsageError(
            "the apex that is installed is another project, which the package index has under "
            f"that name: pip uninstall apex; {_SOURCE}"
        )
    try:
        return importlib.import_module("apex.optimizers").FusedLAMB
    except (ImportError, AttributeError) as error:
        raise UsageError(f"this NVIDIA Apex has no FusedLAMB ({error}): {_SOURCE}") from None
