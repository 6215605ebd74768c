"""Modules that use several weights: recurrent modules, their cells, and nn.MultiheadAttention.

Recurrent: W_ih multiplies the input x_t, W_hh the hidden state h_(t-1), and W_hr of an LSTM with
``proj_size`` the output of the gates. Each is a layer. All gates are one map: g is the gradient of
their sums before the nonlinearity, of size 4 H (LSTM), 3 H (GRU) or H (RNN). Time steps share the
weights, so they are shared positions.

Attention: each projection is seen as a Linear layer. The module multiplies by its packed weights
itself and calls no submodules, so no hook can see a projection. But autograd's graph has a node for
each product. The node has saved the input, and the gradient of the output passes through it. These
nodes are found by walking from the module's output to its weights.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from kfac_bench.core.kernels.gram import at_least_float32, gram
from kfac_bench.core.layers.base import Call, Layer, OtherForwardError, with_ones
from kfac_bench.core.layers.linear import LinearLayer
from kfac_bench.core.layers.unrolled import UnrolledForward
from kfac_bench.core.planning.layer_spec import LayerSpec

RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)


class RecurrentLayer(Layer):
    """One weight matrix of a recurrent module, with its bias.

    ``x`` is a PackedSequence, also for inputs that were not packed. The rows of ``g`` have the same
    order.

    Args:
        name: Name of the layer.
        module: The recurrent module.
        map_name: Name of the matrix without ``weight_``, for example ``ih_l0``.
        unrolled: The context for the forward of ``module``, shared by its layers.
        max_dim: A factor with more rows is kept as a diagonal.
    """

    def __init__(
        self, name: str, module: nn.Module, map_name: str, unrolled: UnrolledForward, max_dim: int
    ) -> None:
        self._map, self._unrolled = map_name, unrolled
        # Orthogonal updates of W_ih save no steps on a GRU of text.
        self.may_be_orthogonalized = map_name.startswith("hh")
        self.forward_context = unrolled
        super().__init__(name, module, max_dim, f"weight_{map_name}", f"bias_{map_name}")

    def is_same_map(self, other: Layer) -> bool:
        """See :meth:`Layer.is_same_map`. Time steps of two modules cannot be told apart."""
        return False

    def calls(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Iterator[Call]:
        """See :meth:`Layer.calls`. The forward must call torch's own function of the module."""
        if self._map not in self._unrolled.calls:
            raise OtherForwardError
        yield from self._unrolled.calls[self._map]

    def size(self, x: Any, g: Tensor) -> tuple[int, float]:
        """See :meth:`Layer.size`. Sequences may differ in length; positions are their mean."""
        samples = int(x.batch_sizes[0])
        return samples, len(g) / samples

    def rows(self, x: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.rows`. Rows after the end of a sequence are zero."""
        a = with_ones(x.data) if self.bias is not None else x.data
        return self._by_sample(a, x), self._by_sample(g, x)

    def moment_a(self, x: Any, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_a`."""
        if self.spec.a_diagonal or self.spec.a_blocks:
            return super().moment_a(x, g)
        return gram(x.data.unsqueeze(0), bias=self.bias is not None)

    def moment_g(self, x: Any, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_g`."""
        return self.moment_of_g(g.unsqueeze(0))

    def sums(self, x: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.sums`. Each sample's sum of a is its own mean times the positions."""
        a_rows, g_rows = self.rows(x, g)
        dtype = at_least_float32(g).dtype
        a, summed_g = a_rows.sum(2, dtype=dtype), g_rows.sum(2, dtype=dtype)
        samples, positions = self.size(x, g)
        if samples * a_rows.shape[2] == len(g):
            return a, summed_g
        lengths = pad_packed_sequence(x)[1].to(a.device, non_blocking=True)
        return a * (positions / lengths).to(dtype).view(1, -1, 1), summed_g

    @staticmethod
    def _by_sample(rows: Tensor, x: PackedSequence) -> Tensor:
        """Reshape rows in the order of ``x`` to [1, N, time steps, d]."""
        samples, steps = int(x.batch_sizes[0]), len(x.batch_sizes)
        if samples * steps == len(rows):
            return rows.view(1, steps, samples, -1).transpose(1, 2)
        padded, _ = pad_packed_sequence(PackedSequence(rows, x.batch_sizes), batch_first=True)
        return padded.unsqueeze(0)


def map_names(module: nn.Module) -> list[str]:
    """Return the names of the weight matrices of a recurrent module, without ``weight_``."""
    names = getattr(module, "_flat_weights_names", ("weight_ih", "weight_hh"))
    return [name.removeprefix("weight_") for name in names if name.startswith("weight_")]


PRODUCTS = {"AddmmBackward0": ("_saved_mat1", 2), "MmBackward0": ("_saved_self", 1)}
"""The attribute with x and the index of the next function that leads to w, by name of the node of
x @ w."""


def reason_to_skip_attention(module: nn.Module) -> str | None:
    """Return why an attention module cannot be covered, or None if it can."""
    assert isinstance(module, nn.MultiheadAttention)
    return None if module._qkv_same_embed_dim else "kdim or vdim differ from embed_dim"


class ProjectionLayer(LinearLayer):
    """One of q, k and v (a third of the rows of the packed weight), or the output projection.

    Args:
        name: Name of the projection.
        module: The attention module.
        part: 0, 1, 2 for q, k, v; None for the output projection.
        max_dim: A factor with more rows is kept as a diagonal.
    """

    reads_saved_tensors = True

    def __init__(
        self, name: str, module: nn.MultiheadAttention, part: int | None, max_dim: int
    ) -> None:
        self._size = module.embed_dim
        self._packed = part is not None
        if part is None:
            super().__init__(name, module.out_proj, max_dim)
            self.modules = [module]
            return
        self.name, self.modules = name, [module]
        self.part = slice(part * self._size, (part + 1) * self._size)
        self.weight, bias = module.in_proj_weight, module.in_proj_bias
        self.bias = bias if isinstance(bias, nn.Parameter) and bias.requires_grad else None
        a_dim = self._size + (self.bias is not None)
        self.spec = LayerSpec(
            name, a_dim, self._size, a_diagonal=a_dim > max_dim, g_diagonal=self._size > max_dim
        )

    @staticmethod
    def of(name: str, module: nn.MultiheadAttention, max_dim: int) -> list[ProjectionLayer]:
        """Return the four projections of ``module``: q, k, v and output."""
        parts = (("in_proj.q", 0), ("in_proj.k", 1), ("in_proj.v", 2), ("out_proj", None))
        prefix = f"{name}." if name else ""
        return [ProjectionLayer(prefix + tail, module, part, max_dim) for tail, part in parts]

    def calls(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Iterator[Call]:
        """See :meth:`Layer.calls`."""
        # Not self.weight: FSDP2 replaces a parameter by the whole one while the module runs.
        name = "in_proj_weight" if self._packed else "out_proj.weight"
        weight = module.get_parameter(name)
        if not (output[0].requires_grad and weight.requires_grad):
            return
        named = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs)
        query = named.get("query")
        if not isinstance(query, Tensor):
            raise OtherForwardError
        samples = 1 if query.ndim == 2 else query.shape[0 if module.batch_first else 1]
        if not samples:
            return
        inputs = [t for t in named.values() if isinstance(t, Tensor) and t.grad_fn is not None]
        found = False
        stop = {get_gradient_edge(t).node for t in inputs}
        first = self.part.start if self._packed else 0
        for node, saved, used in _products(output[0], weight, stop):
            if first not in used:
                continue  # a product with other rows of the packed weight
            found = True
            yield Call(
                _input_of(node, saved, samples),
                GradientEdge(node, 0),
                partial(_columns, samples, first - used.start, self._size),
            )
        if not found:
            raise OtherForwardError


def _input_of(node: Node, saved: str, samples: int) -> Tensor:
    """Return the input of a product as [N, T, d]; attention works on flattened [T, N, d]."""
    x: Tensor = getattr(node, saved).detach()
    return x.view(-1, samples, x.shape[-1]).transpose(0, 1)


def _columns(samples: int, start: int, size: int, g: Tensor) -> Tensor:
    """Return some columns of the gradient of a product's output, [N, T, size]."""
    return g[:, start : start + size].view(-1, samples, size).transpose(0, 1)


def _products(
    output: Tensor, weight: Tensor, stop: Container[Node]
) -> Iterator[tuple[Node, str, range]]:
    """Yield the products with rows of ``weight`` that lead to ``output``.

    Each is its node, the name of the attribute with its input, and the rows that it uses. The walk
    ends at ``stop``, the nodes before the module.
    """
    # A walk over the graph, without recursion: graphs can be deeper than Python's stack.
    stack, seen = [output.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen or node in stop:
            continue
        seen.add(node)
        if node.name() in PRODUCTS:
            saved, at = PRODUCTS[node.name()]
            used = _rows_used(node.next_functions[at], weight)
            if used is not None:
                yield node, saved, used
        stack += [following for following, _ in node.next_functions]


def _rows_used(edge: tuple[Node | None, int], weight: Tensor) -> range | None:
    """Follow casts, transposes and splits to ``weight``. None if they lead elsewhere."""
    rows = range(len(weight))
    while (node := edge[0]) is not None:
        # Only the node of a parameter has a ``variable``: the walk has arrived.
        variable = getattr(node, "variable", None)
        if variable is not None:
            return rows if variable is weight else None
        if len(node.next_functions) != 1:
            return None
        match node.name():
            # Attention with different inputs splits its packed weight: follow the right rows.
            case "SplitBackward0":
                size = node._saved_split_size  # type: ignore[attr-defined]
                rows = rows[edge[1] * size : (edge[1] + 1) * size]
            case "SplitWithSizesBackward0":
                sizes = node._saved_split_sizes  # type: ignore[attr-defined]
                first = sum(sizes[: edge[1]])
                rows = rows[first : first + sizes[edge[1]]]
        edge = node.next_functions[0]
    return None
