"""NVIDIA Apex: its DistributedDataParallel on GPUs, and a lookup of its classes."""

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from kfac_bench.config import BackendConfig
from kfac_bench.core.distributed.collective import Collective, TorchCollective
from kfac_bench.distributed.backend import Backend
from kfac_bench.distributed.backends.ddp import launched, local_device
from kfac_bench.errors import UsageError

LAST = "25.05"
"""The last release of Apex with a DistributedDataParallel."""

SOURCE = "git clone -b {} https://github.com/NVIDIA/apex, then build it as its README says"


class Apex(Backend):
    """The backend that averages gradients with Apex while backward runs."""

    def collective(self) -> Collective:
        """See `Backend.collective`."""
        return TorchCollective()

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """See `Backend.wrap`."""
        wrapper = find("apex.parallel", "DistributedDataParallel")
        with warnings.catch_warnings():
            # Apex warns that this class is deprecated: see docs/how-to/apex.md.
            warnings.simplefilter("ignore", FutureWarning)
            wrapped: nn.Module = wrapper(model)
        return wrapped, optimizer

    def bare(self, model: nn.Module) -> nn.Module:
        """See `Backend.bare`."""
        inner = getattr(model, "module", model)
        assert isinstance(inner, nn.Module)
        return inner

    def part(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """See `Backend.part`."""
        return nullcontext() if last else _alone(model)


@contextmanager
def _alone(model: Any) -> Iterator[None]:
    """Send no messages in forward and backward inside the block, like torch's `no_sync`."""
    model.disable_allreduce()
    try:
        yield
    finally:
        model.enable_allreduce()


@contextmanager
def join(config: BackendConfig, device: str) -> Iterator[Backend]:
    """Join the ranks that torchrun or srun started."""
    find("apex.parallel", "DistributedDataParallel")
    if local_device(device).type != "cuda":
        raise UsageError("backend=apex: Apex averages gradients on GPUs only; use backend=ddp")
    with launched(config, device, Apex) as backend:
        yield backend


def find(module: str, name: str) -> Any:
    """Return the class `name` of NVIDIA Apex.

    Raises:
        UsageError: If Apex or the class is missing. The message says what is installed instead.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        raise UsageError(f"NVIDIA Apex is not installed: {SOURCE.format(LAST)}")
    # The package index has an unrelated project named apex. Only NVIDIA's has this folder.
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        raise UsageError(
            f"the apex that is installed is another project, which the package index has under "
            f"that name: pip uninstall apex; {SOURCE.format(LAST)}"
        )
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"this NVIDIA Apex has no {module}.{name} ({error}), which releases up to {LAST} have: "
            f"{SOURCE.format(LAST)}" + ("; or use backend=ddp" if "parallel" in module else "")
        ) from None
