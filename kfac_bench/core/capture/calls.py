"""The uses of layers in a forward and in derivatives, seen and waiting for their gradients.

Reentrant checkpointing: ``checkpoint(..., use_reentrant=True)`` first runs a segment without a
graph. Inside the backward of the loss it runs the segment again and starts a backward of its own.
:class:`RepeatedForwards` finds the forward that such a call repeats. Without it, calls of one layer
in several segments would count as calls of several batches.

Derivatives (losses on forces, Laplacians, gradient penalties): with ``create_graph=True`` the
backward of y = W a belongs to the graph of the loss. It maps g to W^T g, which is a second use of
W. If the loss has the gradient v with respect to W^T g, this use adds g v^T to the gradient of W.
The derivative of W^T g with respect to g applies W to v, which is a third use, and so on. The
gradient of W is the sum over all uses of one call, its *family*.

In a backward use, v belongs to the loss and g to the model. Everywhere else the g belongs to the
loss. So each sample of a backward use is scaled to (s v, g / s). Its v then has the length that the
inputs a of this sample have in the other uses, times the root of how much the use adds to the
gradient, at most 1. A and G thus do not depend on the scale of the loss or on how a batch is
divided.

:mod:`.hooks` finds the uses, :mod:`.moments` sums them. Only linear layers and convolutions have
such uses here. :mod:`.identity` notices other layers, because their sums lack a part.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from kfac_bench.core.capture.examples import Examples
from kfac_bench.core.kernels.gram import at_least_float32
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.layers.convolution import ConvLayer
from kfac_bench.core.layers.linear import LinearLayer

OUTSIDE = -1
"""The number of the running backward if there is none."""

_CHAIN = 6
"""Most nodes, such as transposes and views, between a product and the weight."""


class Use(Enum):
    """The ways in which a layer uses its W."""

    CALL = "W a + b"
    BACKWARD = "W^T g"
    FORWARD = "W v"


@dataclass(slots=True, weakref_slot=True, eq=False)
class SeenCall:
    """A use of a layer in a forward, whose gradient has not come yet.

    Only the node in autograd's graph refers to this object, so it is gone with the graph. A
    reference back would be a cycle, which holds all activations until Python's garbage collection
    runs.
    """

    layer: Layer
    x: Any
    prepare: Callable[[Tensor], Tensor] | None
    forward: int
    examples: Examples | None
    """The examples of the forward of the model; None if K-FAC does not know them."""
    repeated_in: int
    """The backward in which checkpointing repeats the forward; OUTSIDE if it does not."""
    weight_node: Node
    """Adds to ``.grad`` of the weight."""
    number: int
    """Calls are numbered in their order."""
    use: Use = Use.CALL
    family: int = 0
    """The number of the call whose derivatives use the layer."""

    def release(self) -> None:
        """Let go of the input after a backward that has freed the graph.

        The graph itself lives on while the script keeps the loss, often until the next forward.
        With create_graph=True a use of the layer in its own backward still reads the input.
        """
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        if not keeps_graph and not torch.is_grad_enabled():
            self.x = None


class RepeatedForwards:
    """The calls without a graph, which may be repeated later: the last segment comes first."""

    def __init__(self) -> None:
        self._forwards: dict[str, list[int]] = {}  # by layer, in the order of the calls

    def note(self, name: str, forward: int) -> None:
        """Note a call of a layer without a graph, in the forward with this number."""
        self._forwards.setdefault(name, []).append(forward)

    def origin(self, name: str, forward: int) -> tuple[int, int]:
        """Return the forward that a call with a graph belongs to, and the backward that repeats it.

        Args:
            name: The layer.
            forward: The number of the newest forward.

        Returns:
            The forward, and the number of the backward; :data:`OUTSIDE` if nothing is repeated.
        """
        backward, noted = torch._C._current_graph_task_id(), self._forwards.get(name)
        if backward == OUTSIDE or not noted:
            return forward, OUTSIDE
        return noted.pop(), backward

    def clear(self) -> None:
        """Forget all calls: a step has ended."""
        self._forwards.clear()


class RowsLayer(Layer):
    """A layer whose x and g are its rows of a and g already."""

    __slots__ = ("_layer",)  # not in __dict__, which is that of the layer

    def __init__(self, layer: Layer) -> None:
        self.__dict__ = layer.__dict__
        self._layer = layer

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Layer.from_matrix`."""
        return self._layer.from_matrix(matrix)

    def rows(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.rows`."""
        return x, g


@dataclass(slots=True)
class Family:
    """The uses of one call of a layer."""

    layer: RowsLayer
    forward: tuple[int, int]
    """An argument of :meth:`.Moments.add`, as are ``examples`` and ``magnitude``."""
    examples: int | None
    magnitude: int
    uses: list[tuple[bool, Tensor, Tensor]] = field(default_factory=list)
    """For each use: true for :attr:`Use.BACKWARD`, and the rows of a and g."""

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return the balanced rows of a and g; the uses are shared positions."""
        of_loss = [(a, g) for is_backward, a, g in self.uses if not is_backward]
        backward = [(a, g) for is_backward, a, g in self.uses if is_backward]
        if of_loss and backward:
            (norm_a, norm_g), (norm_v, own_g) = _norms(of_loss), _norms(backward)
            share = norm_v * own_g / (norm_a * norm_g)  # nan or inf if the loss has no g: all of it
            share = share.nan_to_num(1.0, 1.0).clamp_max(1.0)
            length = torch.where(norm_a > 0, norm_a, 1.0) * share.sqrt()
            is_used = (norm_v > 0) & (length > 0)
            s, inverse = (torch.where(is_used, x, 0.0) for x in (length / norm_v, norm_v / length))
            backward = [(a * s, g * inverse) for a, g in backward]
        pairs = of_loss + backward
        return torch.cat([a for a, _ in pairs], 2), torch.cat([g for _, g in pairs], 2)


def _norms(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the norms of all a and of all g of each sample, [1, N, 1, 1]."""
    squares = [[x.square().sum((0, 2, 3), keepdim=True) for x in pair] for pair in pairs]
    a, g = (torch.stack(x).sum(0).sqrt() for x in zip(*squares, strict=True))
    return a, g


def rows(seen: SeenCall, g: Tensor) -> tuple[bool, Tensor, Tensor]:
    """Return whether a use is backward, and its rows of a and g.

    Args:
        seen: The use.
        g: The gradient of what the use returned.
    """
    layer, x = seen.layer, seen.x
    if seen.use is not Use.CALL:
        layer = copy.copy(layer)
        layer.bias = None  # derivatives of y do not depend on it
    is_backward = seen.use is Use.BACKWARD
    a_rows, g_rows = map(at_least_float32, layer.rows(g, x) if is_backward else layer.rows(x, g))
    if layer.bias is not seen.layer.bias:
        a_rows = F.pad(a_rows, (0, 1))
    return is_backward, a_rows, g_rows


def product_of(edge: GradientEdge, seen: SeenCall) -> tuple[Node, list[int]] | None:
    """Return the node that multiplies by the weight, and which of its gradients may be the input's.

    Return None if there is no such node, or if the layer class has rows of its own.

    Args:
        edge: The output of the use.
        seen: The use.
    """
    has_rows = type(seen.layer).rows in (LinearLayer.rows, ConvLayer.rows)
    if not has_rows or seen.layer.reads_saved_tensors:
        return None
    node: Node | None = edge.node
    for _ in range(_CHAIN):
        if node is None:
            return None
        following = [following for following, _ in node.next_functions]
        others = [
            i
            for i, n in enumerate(following)
            if n is not None
            and not _leads_to(n, seen.weight_node)
            and (seen.layer.bias is None or getattr(n, "variable", None) is not seen.layer.bias)
        ]
        if any(n is not None and _leads_to(n, seen.weight_node) for n in following):
            return node, others
        if len(others) != 1:
            return None
        node = following[others[0]]
    return None


def _leads_to(node: Node, weight_node: Node) -> bool:
    """Return whether only transposes and views are between a node and the weight."""
    for _ in range(_CHAIN):
        if node is weight_node:
            return True
        if len(node.next_functions) != 1 or node.next_functions[0][0] is None:
            return False
        node = node.next_functions[0][0]
    return False


def next_use(seen: SeenCall, made: Tensor, g: Tensor, number: int) -> SeenCall | None:
    """Return the use of W that made a gradient of the input of an earlier use.

    Args:
        seen: The earlier use.
        made: The gradient of its input, with a graph.
        g: The gradient of its output.
        number: The number of the new use.
    """
    x = g.detach()
    if made.numel() != seen.x.numel():  # a padded copy, for example
        return None
    if seen.layer.is_linear:
        x = x.reshape(*seen.x.shape[:-1], -1)
    elif x.ndim != seen.x.ndim:
        return None
    shape = seen.x.shape
    use = Use.FORWARD if seen.use is Use.BACKWARD else Use.BACKWARD
    return SeenCall(
        seen.layer,
        x,
        lambda v: v.reshape(shape),
        seen.forward,
        seen.examples,
        seen.repeated_in,
        seen.weight_node,
        number,
        use,
        seen.family,
    )
