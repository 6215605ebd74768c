"""Notices gradients that K-FAC has preconditioned already.

Only certain cases count. K-FAC wrote a gradient if ``.grad`` is the same tensor and no operation
has changed it in place. If exactly one operation has changed each gradient and the optimizer has
made no step, the operation was a further backward or a clip: ``zero_grad()`` with a backward are
two operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from kfac_bench.core.distributed.dtensor import local
from kfac_bench.core.layers.base import Layer


@dataclass(frozen=True, slots=True)
class _Written:
    """A gradient that K-FAC wrote. The reference is weak, because ``zero_grad()`` frees memory."""

    layer: Layer
    grad: TensorWeakRef
    version: int

    def changes(self) -> int | None:
        """Return how many operations have changed ``.grad``; None if it is another tensor."""
        grad = self.layer.weight.grad
        if grad is None or self.grad() is not grad:
            return None
        return _version(grad) - self.version


class StepOrder:
    """The order of K-FAC's steps, the optimizer's steps and backward.

    Args:
        layers: The layers that K-FAC covers.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._written: list[_Written] = []
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
        return self._all_changed_by(0)

    def check(self) -> None:
        """Check that the gradients were not preconditioned before.

        Raises:
            RuntimeError: They were.
        """
        if self._optimizer_stepped or not self._written:
            return
        if self._all_changed_by(0) or (self._sees_optimizer and self._all_changed_by(1)):
            raise RuntimeError(
                "step() was called twice without optimizer.step() in between: K-FAC would "
                "precondition the same gradients again. Call it once, after the last backward"
            )

    def _all_changed_by(self, operations: int) -> bool:
        return bool(self._written) and all(w.changes() == operations for w in self._written)

    def mark(self) -> None:
        """Remember the gradients that K-FAC has just written."""
        self._optimizer_stepped = False
        self._written = [
            _Written(layer, TensorWeakRef(layer.weight.grad), _version(layer.weight.grad))
            for layer in self._layers
            if layer.weight.grad is not None
        ]


def _version(grad: Tensor) -> int:
    with torch.no_grad():
        return local(grad)._version
