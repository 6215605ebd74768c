"""Notices a step of K-FAC that runs twice on the same gradients, and steps that never run."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from kfac_bench.core.capture.safe_hooks import SafeHook
from kfac_bench.core.distributed.dtensor import is_sharded, local
from kfac_bench.core.layers.base import Layer

CHANGES = 3
"""So often the weights may change between two steps of K-FAC. Methods such as SAM change the
weights twice in a step."""


class StepOrder:
    """The order of K-FAC's steps, the optimizer's steps and backward.

    Only certain cases count. K-FAC wrote a gradient if ``.grad`` is the same tensor and no
    operation has changed it in place. If exactly one operation has changed each gradient and the
    optimizer has made no step, the operation was a further backward or a clip: ``zero_grad()`` with
    a backward are two operations.

    Args:
        layers: The layers that K-FAC covers.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        # The gradients that K-FAC wrote. Weak references, because zero_grad() frees memory.
        self._written: list[tuple[Layer, TensorWeakRef, int]] = []
        # Some wrappers call another optimizer's step, so a step that was not seen proves nothing.
        self._sees_optimizer = self._optimizer_stepped = False

    def optimizer_steps(self) -> None:
        """Note that the optimizer makes a step now."""
        self._sees_optimizer = self._optimizer_stepped = True

    def has_gradients(self) -> bool:
        """Return whether backward reached a layer."""
        return any(layer.weight.grad is not None for layer in self._layers)

    def is_untouched(self) -> bool:
        """Return whether all gradients are exactly those that K-FAC wrote."""
        return self._changes() == {0}

    def check(self) -> None:
        """Check that the gradients were not preconditioned before.

        Raises:
            RuntimeError: They were.
        """
        proofs: list[set[int | None]] = [{0}, {1}] if self._sees_optimizer else [{0}]
        if not self._optimizer_stepped and self._changes() in proofs:
            raise RuntimeError(
                "step() was called twice without optimizer.step() in between: K-FAC would "
                "precondition the same gradients again. Call it once, after the last backward"
            )

    def _changes(self) -> set[int | None]:
        """Return how many operations have changed the gradients; None for another tensor."""
        changes: set[int | None] = set()
        for layer, written, version in self._written:
            grad = layer.weight.grad
            if grad is None or written() is not grad:
                changes.add(None)
            else:
                changes.add(_version(grad) - version)
        return changes

    def mark(self) -> None:
        """Remember the gradients that K-FAC has just written."""
        self._optimizer_stepped = False
        self._written = [
            (layer, TensorWeakRef(layer.weight.grad), _version(layer.weight.grad))
            for layer in self._layers
            if layer.weight.grad is not None
        ]


def _version(grad: Tensor) -> int:
    with torch.no_grad():
        return local(grad)._version


class MissingStep:
    """Counts forward passes whose weights differ from those of the pass before.

    Args:
        model: The model, without wrapper.
        layer: The layer whose weight is observed.
        warn: Gives a warning of a kind once.
    """

    def __init__(self, model: nn.Module, layer: Layer, warn: Callable[[str, str], None]) -> None:
        self._layer, self._warn = layer, warn
        self._version: int | None = None
        self._changes = 0
        self.handle = model.register_forward_pre_hook(SafeHook(self._before_forward))

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        weight = self._layer.weight
        # FSDP2 writes into weights of its own before each forward.
        if not (module.training and torch.is_grad_enabled()) or is_sharded(weight):
            return
        self._changes += self._version not in (None, weight._version)
        self._version = weight._version
        if self._changes == CHANGES:
            self._warn(
                "missing step",
                f"the weights have changed {CHANGES} times, but K-FAC made no step: call "
                "kfac.step() before optimizer.step(), or attach() K-FAC to the optimizer whose "
                "step() runs. Build K-FAC with the optimizer that Horovod, Accelerate or another "
                "framework returns",
            )

    def step(self) -> None:
        """Note a step of K-FAC."""
        self._version, self._changes = None, 0
