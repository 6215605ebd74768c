"""Notices a loss that is a sum over the examples, and a loss scale that K-FAC does not know.

K-FAC does not see the loss of a script, so these checks are heuristics. They compute numbers on the
device and read them at a step that decomposes, until the numbers of a step are finite.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from kfac_bench.core.capture.identity import GradientIdentity
from kfac_bench.core.capture.moments import Collected
from kfac_bench.core.distributed.dtensor import is_sharded
from kfac_bench.core.layers.base import Layer

IS_ZERO = 1e-3
"""Share of a sum of squares below which a sum is zero, up to rounding in bfloat16."""
LEAST_SCALE = 2.0**7
"""Smallest loss scale that is reported. GradScaler starts at 2^16."""
SURE_SCALE = 2.0**12
"""Factor from which on any number is reported as a loss scale. Clipping rarely shrinks as much."""
PRECISION = 1e-5
"""Relative error of a norm in float32. Powers of two multiply a gradient without an error."""

Warn = Callable[[str, str], None]


def is_power_of_two(factor: float) -> bool:
    """Return whether ``factor`` is a power of two, up to rounding. GradScaler's scales are."""
    return abs(factor / 2.0 ** round(math.log2(factor)) - 1) <= PRECISION


class _Evidence:
    """Numbers of one step on the device."""

    def __init__(self, *, is_done: bool = False) -> None:
        self.is_done = is_done
        self.numbers: Tensor | None = None

    def read(self, above: float = -math.inf) -> list[float] | None:
        """Return the first numbers that are finite and ``above`` a bound; an overflow is not."""
        if self.numbers is None or self.is_done:
            return None
        numbers, self.numbers = self.numbers.tolist(), None
        self.is_done = all(math.isfinite(x) and x > above for x in numbers)
        return numbers if self.is_done else None


class MeanCheck:
    """Looks at the output gradients of the head, the layer that backward reaches first.

    Under a softmax cross entropy they are w (p - y), which sums to zero over the classes: no other
    usual loss has this mark. The mean over N examples has w = 1/N. For *any* weighted mean, the
    mean over the positions of the squared norm of N w (p - y) is at most 2 N. For a sum it is up to
    2 N^2, about N^2 in a new model.
    """

    def __init__(self) -> None:
        self.evidence = _Evidence()
        self._samples: float = 0

    def see(self, collected: Mapping[str, Collected], loss_scale: float | Tensor) -> None:
        """Look at the statistics of a step, of which ``loss_scale`` is still a factor."""
        head = next(iter(collected.values()), None)
        if self.evidence.is_done or head is None or head.g.ndim != 3 or len(head.g) != 1:
            return
        if isinstance(head.samples, Tensor):  # a pass was discarded: another step will tell
            return
        g, self._samples = head.g[0], head.samples
        squares = g.diagonal().sum()
        if isinstance(loss_scale, Tensor):
            loss_scale = loss_scale.to(g.device)
        norm = squares * (self._samples**2 / head.rows) / (loss_scale * loss_scale)
        self.evidence.numbers = torch.stack([g.sum() / squares, norm])

    def judge(self, warn: Warn) -> None:
        """Warn if the loss cannot be a mean. This reads from the device."""
        sums, square = self.evidence.read() or (math.inf, 0.0)
        if abs(sums) < IS_ZERO and square > 2.1 * self._samples:
            warn(
                "mean",
                f"the loss is about {math.sqrt(square):.0f} times too large for a mean over the "
                f"{self._samples} examples of this step. Use the mean, not the sum, over the "
                "examples (with gradient accumulation: over all micro-batches), and tell K-FAC the "
                "loss scale if there is one",
            )


class LossScaleCheck:
    """Compares the gradient that came during backward with the one in ``.grad``.

    Both are equal in a right script, up to clipping.

    Args:
        layer: The last layer whose statistics this rank computes.
        identity: Has the gradient that came.
    """

    def __init__(self, layer: Layer, identity: GradientIdentity) -> None:
        self._layer, self._identity = layer, identity
        self._evidence = _Evidence(is_done=is_sharded(layer.weight))

    def see(self, loss_scale: float | Tensor) -> None:
        """Compare the gradients of this step; ``loss_scale`` is what the user passed."""
        came, self._identity.last_gradient = self._identity.last_gradient, None
        grad = self._layer.weight.grad
        if self._evidence.is_done or came is None or grad is None:
            return
        norms = torch.stack([came.norm(), grad[self._layer.part].to(came.dtype).norm()])
        if isinstance(loss_scale, Tensor):
            loss_scale = loss_scale.to(norms.device)
        self._evidence.numbers = torch.cat([norms, norms.new_ones(1) * loss_scale])

    def judge(self, warn: Warn) -> bool:
        """Warn about a loss scale; return whether there was one. This reads from the device."""
        came, grad, told = self._evidence.read(above=0) or (1.0, 1.0, 1.0)
        factor = came / grad / told
        strength = max(factor, 1 / factor)
        if strength < LEAST_SCALE or not (strength >= SURE_SCALE or is_power_of_two(strength)):
            return False
        if factor > 1:
            warn(
                "loss_scale",
                f"during backward the gradients were {factor:.0f} times those in .grad, so a loss "
                "scale multiplied the loss. K-FAC must know it: use attach(scaler), or "
                "step(loss_scale=scaler.get_scale)",
            )
        else:
            warn(
                "unscale",
                f"the loss scale {told:.0f} is still in .grad: call scaler.unscale_(optimizer) "
                "before step()",
            )
        return True


class LaterUnscaling:
    """Notices gradients that are unscaled between K-FAC's step and the optimizer's step."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._evidence = _Evidence(is_done=is_sharded(layer.weight))
        self._written: Tensor | None = None

    def mark(self) -> None:
        """Remember the size of the gradient that K-FAC has just written."""
        grad = self._layer.weight.grad
        self._written = None if self._evidence.is_done or grad is None else grad.norm()

    def see(self, optimizer: Optimizer, warn: Warn) -> None:
        """Compare, right before the optimizer's step."""
        written, self._written = self._written, None
        grad = self._layer.weight.grad
        if written is None or grad is None:
            return
        if getattr(optimizer, "grad_scale", None) is not None:
            # A fused optimizer unscales in its own step.
            self._evidence.is_done = True
            self._report(warn)
        self._evidence.numbers = (written / grad.norm()).reshape(1)

    def judge(self, warn: Warn) -> None:
        """Warn if a loss scale was divided out. This reads from the device."""
        (factor,) = self._evidence.read(above=0) or (1.0,)
        if factor >= LEAST_SCALE and is_power_of_two(factor):
            self._report(warn)

    @staticmethod
    def _report(warn: Warn) -> None:
        warn(
            "unscale",
            "the gradients were still multiplied by the loss scale in step(): call "
            "scaler.unscale_(optimizer) before, and pass step(loss_scale=scaler.get_scale)",
        )
