"""Notices a loss scale that K-FAC does not know, or that is still in the gradients.

K-FAC does not see the loss of a script, so these checks are heuristics. Each check compares two
gradients that are equal in a right script, up to clipping. GradScaler's scales are powers of two.
The quotients are computed on the device and read at a step that decomposes, until one of them is
finite.
"""

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from kfac_bench.core.capture.identity import GradientIdentity
from kfac_bench.core.distributed.dtensor import is_sharded
from kfac_bench.core.guards.notices import Notices
from kfac_bench.core.layers.base import Layer

LEAST_SCALE = 2.0**7
"""Smallest factor that is reported. GradScaler starts at 2^16."""
SURE_SCALE = 2.0**12
"""From this factor on it need not be a power of two: a clip is rarely as strong."""
PRECISION = 1e-5
"""Relative error of a norm in float32. Powers of two multiply a gradient without an error."""


def is_power_of_two(factor: float) -> bool:
    """Return whether ``factor`` is a power of two, up to rounding."""
    return abs(factor / 2.0 ** round(math.log2(factor)) - 1) <= PRECISION


class LossScaleCheck:
    """Compares the gradient that came during backward with the one in ``.grad``.

    Args:
        layer: The last layer whose statistics this rank computes.
        identity: Has the gradient that came.
    """

    def __init__(self, layer: Layer, identity: GradientIdentity) -> None:
        self._layer, self._identity = layer, identity
        self._is_done = is_sharded(layer.weight)
        self._evidence: Tensor | None = None

    def see(self, loss_scale: float | Tensor) -> None:
        """Compare the gradients of this step; ``loss_scale`` is what the user passed."""
        came, self._identity.last_gradient = self._identity.last_gradient, None
        grad = self._layer.weight.grad
        if self._is_done or came is None or grad is None:
            return
        norms = torch.stack([came.norm(), grad[self._layer.part].to(came.dtype).norm()])
        if isinstance(loss_scale, Tensor):
            loss_scale = loss_scale.to(norms.device)
        self._evidence = torch.cat([norms, norms.new_ones(1) * loss_scale])

    def judge(self, notices: Notices) -> bool:
        """Warn about a loss scale; return whether there was one. This reads from the device."""
        if self._evidence is None:
            return False
        evidence, self._evidence = self._evidence.tolist(), None
        came, grad, told = evidence
        if not all(map(math.isfinite, evidence)) or min(evidence) <= 0:
            return False  # an overflow: another step will tell
        self._is_done = True
        factor = came / grad / told
        strength = max(factor, 1 / factor)
        if strength < LEAST_SCALE:
            return False
        if strength < SURE_SCALE and not is_power_of_two(strength):
            return False
        if factor > 1:
            notices.give(
                "loss_scale",
                f"during backward the gradients were {factor:.0f} times those in .grad, so a loss "
                "scale multiplied the loss. K-FAC must know it: use attach(scaler), or "
                "step(loss_scale=scaler.get_scale)",
            )
        else:
            notices.give(
                "unscale",
                f"the loss scale {told:.0f} is still in .grad: call scaler.unscale_(optimizer) "
                "before step()",
            )
        return True


class LaterUnscaling:
    """Notices gradients that are unscaled between K-FAC's step and the optimizer's step."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._is_done = is_sharded(layer.weight)
        self._written: Tensor | None = None
        self._evidence: Tensor | None = None

    def mark(self) -> None:
        """Remember the size of the gradient that K-FAC has just written."""
        grad = self._layer.weight.grad
        self._written = None if self._is_done or grad is None else grad.norm()

    def see(self, optimizer: Optimizer, notices: Notices) -> None:
        """Compare, right before the optimizer's step."""
        written, self._written = self._written, None
        grad = self._layer.weight.grad
        if written is None or grad is None:
            return
        if getattr(optimizer, "grad_scale", None) is not None:
            # A fused optimizer unscales in its own step.
            self._is_done = True
            self._warn(notices)
        self._evidence = written / grad.norm()

    def judge(self, notices: Notices) -> None:
        """Warn if a loss scale was divided out. This reads from the device."""
        if self._evidence is None or self._is_done:
            return
        factor = self._evidence.item()
        self._evidence = None
        if not math.isfinite(factor) or factor <= 0:
            return
        self._is_done = True
        if factor >= LEAST_SCALE and is_power_of_two(factor):
            self._warn(notices)

    def _warn(self, notices: Notices) -> None:
        notices.give(
            "unscale",
            "the gradients were still multiplied by the loss scale in step(): call "
            "scaler.unscale_(optimizer) before, and pass step(loss_scale=scaler.get_scale)",
        )
