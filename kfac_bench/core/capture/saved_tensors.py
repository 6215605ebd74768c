"""Tensors that autograd saves in attention, kept readable for the hooks of :mod:`.hooks`."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from kfac_bench.core.capture.safe_hook import SafeHook


def _same(saved: Tensor) -> Tensor:
    return saved.detach()  # an output that is saved as it is would keep itself alive


class SavedTensors:
    """Hooks that let layers read what autograd saves: checkpointing would allow one read only.

    Args:
        is_enabled: Returns whether layers will read.
    """

    def __init__(self, is_enabled: Callable[[], bool]) -> None:
        self._is_enabled = is_enabled
        self._holding: list[saved_tensors_hooks] = []

    def hooks(self, module: nn.Module) -> Iterator[RemovableHandle]:
        """Put hooks on a module whose layers read saved tensors; yield their handles."""
        yield module.register_forward_pre_hook(SafeHook(self._hold))
        yield module.register_forward_hook(SafeHook(self._release), always_call=True)

    def _hold(self, module: nn.Module, inputs: object) -> None:
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        hooked = top is None or top(True) is not None  # torch 2.6 cannot tell
        # A hook that returns the tensor itself hides the hooks of checkpointing from this module.
        if hooked and self._is_enabled() and module.training:
            self._holding.append(saved_tensors_hooks(_same, _same))
            self._holding[-1].__enter__()

    def _release(self, module: nn.Module, inputs: object, output: object) -> None:
        if self._holding:
            self._holding.pop().__exit__()
