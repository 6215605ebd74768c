"""Comparisons of the statistics of a layer with its gradient.

For each layer the sum of g a^T over all rows that the hooks saw in a backward *is* the gradient
that this backward adds to ``.grad`` of the weight. :class:`GradientIdentity` compares both where
the gradient arrives at the weight. There it is that of this rank and of this backward alone: it is
not yet averaged over ranks, unscaled or clipped.
:class:`~kfac_bench.core.guards.statistics.StatisticsCheck` judges the results.

:class:`AssignedGradients` compares statistics of gradients that ``torch.autograd.grad`` returns and
the script assigns itself. Nothing here reads from the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from kfac_bench.core.capture.moments import Collected, Forward, Moments
from kfac_bench.core.distributed.dtensor import is_sharded
from kfac_bench.core.kernels.gram import at_least_float32, without_autocast
from kfac_bench.core.layers.base import Layer


@dataclass(slots=True)
class _Sum:
    """The sum of g a^T of one layer in one backward, and a bound of its norm."""

    total: Tensor
    bound: Tensor
    handle: RemovableHandle | None = None


class GradientIdentity:
    """Compares sums of g a^T with gradients, for the layers that are ``due``.

    A layer is left out in a step in which its gradient has parts that no statistic should have:
    calls in eval mode or inside ``pause()``, and a hook of the script that changes the gradient.

    Args:
        layers: The layers whose statistics this rank computes.

    Attributes:
        due: The names of the layers to compare.
        compared: Those that were compared in an earlier step and are not judged yet. One step is
            enough for a verdict, and a comparison takes as long as the gradient of a layer.
        results: By layer, the squares of four norms, summed over the backwards of a step: of the
            sum, of the gradient, of their difference, and of the bound of the sum.
        is_half: The names of layers whose gradients came in half precision.
        last_gradient: The gradient that backward added to the last layer, for its loss scale.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.due = {layer.name for layer in layers}
        self.compared: set[str] = set()
        self.results: dict[str, Tensor] = {}
        self.is_half: set[str] = set()
        self.last_gradient: Tensor | None = None
        self._last = layers[-1].name if layers else None
        self._sums: dict[tuple[str, int], _Sum] = {}  # by layer and backward
        self._excused: set[str] = set()

    def excuse(self, name: str) -> None:
        """Do not compare a layer in this step."""
        if name in self.due:
            self._excused.add(name)

    def add(self, layer: Layer, weight_node: Node, x: Any, g: Tensor) -> None:
        """Add a call, whose gradient has come in the running backward."""
        name = layer.name
        if name not in self.due or name in self._excused or name in self.compared:
            return
        weight: Tensor = weight_node.variable  # type: ignore[attr-defined]
        if weight._backward_hooks:  # the script changes the gradient, for example by a mask
            self._excused.add(name)
            return
        if g.dtype.itemsize < 4:
            self.is_half.add(name)
        try:
            total, bound = layer.gradient(x, g)
        except NotImplementedError:  # a layer class of the user may have moments but no rows
            self.due.discard(name)
            return
        key = name, torch._C._current_graph_task_id()
        if key in self._sums:
            self._sums[key].total += total
            self._sums[key].bound += bound
            return
        self._sums[key] = new = _Sum(total, bound)
        new.handle = weight_node.register_prehook(partial(self._compare, layer, weight, key))

    def _compare(
        self,
        layer: Layer,
        weight: Tensor,
        key: tuple[str, int],
        grads: tuple[Tensor | None, ...],
    ) -> None:
        """Compare with the gradient that arrives at the weight."""
        made, gradient = self._sums.pop(key, None), grads[0]
        if made is not None and made.handle is not None:
            made.handle.remove()
        if key[1] != torch._C._current_graph_task_id():  # the backward of the sum has failed
            return
        is_excused = layer.name in self._excused or layer.name not in self.due
        if made is None or gradient is None or is_excused or is_sharded(gradient):
            return
        with torch.no_grad(), without_autocast(gradient):
            gradient = at_least_float32(gradient.detach()[layer.part])
            total, _ = layer.from_matrix(made.total)
            rest = _without_penalty(gradient - total, weight.detach()[layer.part])
            squares = [total.square().sum(), gradient.square().sum(), rest, made.bound.square()]
            new, old = torch.stack(squares), self.results.get(layer.name)
            self.results[layer.name] = new if old is None else old + new
            if layer.name == self._last:
                old = self.last_gradient
                self.last_gradient = gradient.clone() if old is None else old + gradient

    def end_step(self) -> None:
        """Start a new step. The results stay until they are judged."""
        for made in self._sums.values():  # of backwards that failed
            if made.handle is not None:
                made.handle.remove()
        self._sums.clear()
        self._excused.clear()
        self.compared.update(self.results)


def _without_penalty(difference: Tensor, weight: Tensor) -> Tensor:
    """Return the squared norm of a difference, less what a penalty on the weights adds.

    The gradient of an L2 penalty is a multiple of the weight, the one of an L1 penalty a multiple
    of its signs. Such a term of the loss has no statistics, and needs none.
    """
    weight = weight.to(difference.dtype)
    signs = weight.sign()
    products = [(x * y).sum() for x, y in ((weight, weight), (weight, signs), (signs, signs))]
    ww, ws, ss = products
    rw, rs = (difference * weight).sum(), (difference * signs).sum()
    square = difference.square().sum()
    # Of the plane of both vectors; of the weight alone if the signs are a multiple of it.
    determinant = ww * ss - ws * ws
    is_plane = determinant > 1e-6 * ww * ss
    plane = (ss * rw * rw - 2 * ws * rw * rs + ww * rs * rs) / determinant.clamp_min(1e-30)
    line = rw * rw / ww.clamp_min(1e-30)
    return (square - torch.where(is_plane, plane, line)).clamp_min(0)


SAME_DIRECTION = 0.9
"""Least square of the cosine between two gradients that count as one, perhaps clipped."""


class AssignedGradients:
    """Moments of passes of ``torch.autograd.grad``, which count if ``.grad`` has their gradient.

    The moments of all such passes of a step are summed, and so are their gradients. At the end of
    the step the sum of the gradients is compared with ``.grad``. The result stays on the device: if
    they differ, the moments become zero and count no samples.

    Args:
        moments: Sums the moments.
    """

    def __init__(self, moments: Moments) -> None:
        self._moments = moments
        self._sums: dict[str, tuple[Layer, Tensor]] = {}
        # Layers that got gradients by backward in this step. Passes of torch.autograd.grad mean
        # nothing there, unless these gradients were discarded.
        self._ignored: set[str] = set()

    def add(self, layer: Layer, x: Any, g: Tensor, forward: Forward, **options: Any) -> None:
        """Add one call; see :meth:`Moments.add`."""
        if layer.name in self._ignored and layer.weight.grad is not None:
            return
        try:
            total, _ = layer.gradient(x, g)
        except NotImplementedError:  # a layer class of the user may have moments but no rows
            return
        self._moments.add(layer, x, g, forward, **options)
        if layer.name in self._sums:
            total += self._sums[layer.name][1]
        self._sums[layer.name] = layer, total

    def ignore(self, layer: Layer) -> None:
        """Forget a layer: a backward adds to its ``.grad``."""
        self._ignored.add(layer.name)
        if self._sums.pop(layer.name, None) is not None:
            self._moments.forget(layer.name)

    def pop(self) -> dict[str, Collected]:
        """Return the moments of layers whose ``.grad`` may have been assigned; start again."""
        for name, (layer, total) in self._sums.items():
            gradient = layer.get_grad()
            if gradient is None:
                self._moments.forget(name)
                continue
            product = (total * gradient).sum()
            bound = SAME_DIRECTION * total.square().sum() * gradient.square().sum()
            is_same = (product > 0) & (product * product >= bound)
            self._moments.forget_where(name, ~is_same)
        self._sums.clear()
        self._ignored.clear()
        return self._moments.pop()
