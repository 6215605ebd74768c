"""Notices a loss scale that K-FAC does not know, or that is still in the gradients.

K-FAC does not see the loss of a script, so these checks are heuristics. Each check compares two
gradients that are equal in a right script, up to clipping. GradScaler's scales are powers of two.
The quotients are computed on the device and read at a step that decomposes, until one of them is
finite.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from kfac_bench.core.capture.gradient_watch import node_of, weight_getter, will_run
from kfac_bench.core.capture.safe_hook import SafeHook
from kfac_bench.core.distributed.dtensor import is_sharded
from kfac_bench.core.guards.notices import Notices
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.layers.norms import NormLayer

LEAST_SCALE = 2.0**7
"""Smallest factor that is reported. GradScaler starts at 2^16."""
SURE_SCALE = 2.0**12
"""From this factor on it need not be a power of two: a clip is rarely as strong."""
HALF_PRECISION = 1e-2
"""Relative error of a sum of gradients in half precision."""
FULL_PRECISION = 1e-5
"""Relative error of a norm in float32. Powers of two multiply a gradient without an error."""
CANCELLED = 1e-3
"""A sum this much smaller than its terms is noise: the bias before a batch norm."""


def is_power_of_two(factor: float, tolerance: float) -> bool:
    """Return whether ``factor`` is a power of two, up to the relative ``tolerance``."""
    return abs(factor / 2.0 ** round(math.log2(factor)) - 1) <= tolerance


class OutputGradients:
    """The sum of the output gradients of a layer. Without a loss scale it is the bias' gradient.

    Args:
        layers: The layers of a model. The last one with a bias is observed.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        usable = [
            layer
            for layer in layers
            if layer.bias is not None
            and not isinstance(layer, NormLayer)  # its g has gradients of the scale, too
            and not layer.reads_saved_tensors
            and layer.forward_context is None  # its calls exist only at steps with statistics
            and not is_sharded(layer.weight)
        ]
        self._layer = layer = usable[-1] if usable else None
        self._sum: Tensor | None = None
        self._size: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        if layer is None:
            return
        for module in layer.modules:
            hook = SafeHook(partial(self._on_forward, weight_getter(layer, module)))
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True, prepend=True))

    def _on_forward(
        self,
        weight_of: Callable[[nn.Module], Tensor],
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> None:
        layer, weight = self._layer, weight_of(module)
        assert layer is not None
        is_trained = weight.requires_grad and isinstance(weight, nn.Parameter)
        if is_trained and module.training and torch.is_grad_enabled():
            node = node_of(weight)
            for call in layer.calls(module, args, kwargs, output):
                add = partial(self._add, layer, node, call.x, call.prepare, call.edge.output_nr)
                call.edge.node.register_prehook(add)

    def _add(
        self,
        layer: Layer,
        weight_node: Node,
        x: Tensor,
        prepare: Callable[[Tensor], Tensor] | None,
        output_nr: int,
        grads: tuple[Tensor | None, ...],
    ) -> None:
        g = grads[output_nr]
        # A pass that does not reach .grad belongs to another loss: an adversarial example.
        if g is None or not self._handles or not will_run(weight_node) or not g.numel():
            return
        with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
            _, each = layer.sums(x, g if prepare is None else prepare(g))
            total, size = each.sum(1), each.abs().sum(1)
            self._sum = total if self._sum is None else self._sum + total
            self._size = size if self._size is None else self._size + size

    def forget(self) -> None:
        """Start a new step."""
        self._sum = self._size = None

    def norms(self) -> Tensor | None:
        """Return three norms: of the sum, of the sum of absolute values, of the bias' gradient."""
        total, size = self._sum, self._size
        if self._layer is None or self._layer.bias is None or total is None or size is None:
            return None
        grad = self._layer.bias.grad
        if grad is None:
            return None
        return torch.stack([total.norm(), size.norm(), grad.to(total.dtype).norm()])

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class LossScaleCheck:
    """Compares the gradients that the hooks see during backward with those in ``.grad``."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._outputs: OutputGradients | None = OutputGradients(layers)
        self._evidence: Tensor | None = None

    def see(self, loss_scale: float | Tensor) -> None:
        """Compare the gradients of this step; ``loss_scale`` is what the user passed."""
        if self._outputs is None or (norms := self._outputs.norms()) is None:
            return
        if isinstance(loss_scale, Tensor):
            loss_scale = loss_scale.to(norms.device)
        self._evidence = torch.cat([norms, norms.new_ones(1) * loss_scale])

    def end_step(self) -> None:
        """Forget the gradients of a step, also of one without statistics."""
        if self._outputs is not None:
            self._outputs.forget()

    def judge(self, notices: Notices) -> bool:
        """Warn about a loss scale; return whether there was one. This reads from the device."""
        if self._evidence is None:
            return False
        evidence, self._evidence = self._evidence.tolist(), None
        total, size, grad, told = evidence
        is_finite = all(map(math.isfinite, evidence))
        if not is_finite or min(grad, told) <= 0 or total <= CANCELLED * size:
            return False  # an overflow, or noise: another step will tell
        self.remove()
        factor = total / grad / told
        strength = max(factor, 1 / factor)
        if strength < LEAST_SCALE:
            return False
        if strength < SURE_SCALE and not is_power_of_two(strength, HALF_PRECISION):
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

    def remove(self) -> None:
        """Remove the hooks; nothing is compared any more."""
        if self._outputs is not None:
            self._outputs.remove()
            self._outputs = None


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
        if factor >= LEAST_SCALE and is_power_of_two(factor, FULL_PRECISION):
            self._warn(notices)

    def _warn(self, notices: Notices) -> None:
        notices.give(
            "unscale",
            "the gradients were still multiplied by the loss scale in step(): call "
            "scaler.unscale_(optimizer) before, and pass step(loss_scale=scaler.get_scale)",
        )
