"""Notices a training loop in which K-FAC never runs, so that the optimizer alone trains."""

from collections.abc import Sequence

import torch
from torch import nn

from kfac_bench.core.capture.safe_hook import SafeHook
from kfac_bench.core.distributed.dtensor import is_sharded
from kfac_bench.core.guards.notices import Notices
from kfac_bench.core.layers.base import Layer

CHANGES = 3
"""So often the weights may change between two steps of K-FAC. Methods such as SAM change the
weights twice in a step."""


class MissingStep:
    """Counts forward passes whose weights differ from those of the pass before.

    Args:
        model: The model, without wrapper.
        layers: The layers that K-FAC covers. The weight of the last one is observed.
        notices: Gives the warning.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], notices: Notices) -> None:
        self._layer, self._notices = layers[-1], notices
        self._version: int | None = None
        self._changes = 0
        self._handle = model.register_forward_pre_hook(SafeHook(self._before_forward))

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        weight = self._layer.weight
        # FSDP2 writes into weights of its own before each forward.
        if not (module.training and torch.is_grad_enabled()) or is_sharded(weight):
            return
        self._changes += self._version not in (None, weight._version)
        self._version = weight._version
        if self._changes == CHANGES:
            self._notices.give(
                "missing step",
                f"the weights have changed {CHANGES} times, but K-FAC made no step: call "
                "kfac.step() before optimizer.step(), or attach() K-FAC to the optimizer whose "
                "step() runs. Build K-FAC with the optimizer that Horovod, Accelerate or another "
                "framework returns",
            )

    def step(self) -> None:
        """Note a step of K-FAC."""
        self._version, self._changes = None, 0

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()
