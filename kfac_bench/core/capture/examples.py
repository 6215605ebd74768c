"""The number of examples in a forward of the model, and the rows of a layer that belong to each.

The hooks of :mod:`.hooks` note what the model gets. A layer may get other rows than one per
example: the tokens of an expert, boxes of pictures, time steps first, positions without a batch.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn.utils.rnn import PackedSequence

from kfac_bench.core.layers.base import Call

VIEWS = ("UnsqueezeBackward0", "ViewBackward0", "UnsafeViewBackward0")
"""Names of nodes that may be between the embedding of positions and the sum with that of tokens."""


class Examples:
    """The examples of one forward, which the first tensor among the inputs of the model tells.

    Its first dimension counts them. Exceptions:

    * A PackedSequence counts its sequences.
    * If attention or a recurrent module gets this tensor with the time first
      (``batch_first=False``), its second dimension counts. If both dimensions are equal, their
      order is unknown, and the first counts.
    * If attention or a recurrent module gets another tensor with the time first, whose second
      dimension has as many examples, the model has moved the time there itself.
    * If a convolution, attention or a recurrent module gets it without a batch, it is one example.
    * A list of tensors is not read. Detection gives pictures as a list, and its heads have losses
      that are means over boxes, so the boxes that a head gets are right there.

    Args:
        inputs: Positional and keyword inputs of the model.
        forward: The number of the forward.

    Attributes:
        has_gradients: Whether the forward began with gradients.
        count: The number of examples. None if there is no such tensor, or if it is a vector of
            floating-point numbers, which may be one example. Then the layer's own input counts.
    """

    def __init__(self, inputs: object, forward: int) -> None:
        self.forward, self.has_gradients = forward, torch.is_grad_enabled()
        self.shape: tuple[int, ...] = ()
        self.count: int | None = None
        self.lookups: list[tuple[Any, GradientEdge, Callable[[], None]]] = []
        """Lookups of other shapes: the call, its edge, and what takes the hook off again."""
        self._is_time_first = False
        # Scalars are settings, for example the time of a diffusion. Empty tensors are no batch.
        match next((x for x in _tensors(inputs) if not _is_setting(x)), None):
            case PackedSequence(batch_sizes=sizes):
                self.count = int(sizes[0])
            case Tensor() as x if x.is_nested:
                self.count = x.size(0)
            case Tensor() as x if x.ndim > 1 or not x.is_floating_point():
                self.shape, self.count = tuple(x.shape), len(x)

    def note_sequence(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Note the input of a module with ``batch_first``."""
        x = next(_tensors((args, kwargs)), None)
        # Token ids are the input of a whole model, which may have such an attribute, too.
        if not isinstance(x, Tensor) or x.is_nested or not x.is_floating_point():
            return
        if x.shape[:2] != self.shape[:2]:
            # The model has perhaps moved the time to the front itself.
            is_moved = x.ndim == 3 and not module.batch_first
            self._is_time_first |= is_moved and x.shape[1] == self.count != len(x)
        elif x.ndim == 2:
            if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
                self.note_single(x)
        elif not module.batch_first and self.shape[0] != self.shape[1]:
            self._is_time_first, self.count = True, self.shape[1]

    def note_single(self, x: Tensor) -> None:
        """Note an input of a layer that has no batch."""
        if x.shape == self.shape:
            self.count = 1

    def is_time_first(self, x: object, g: Tensor) -> bool:
        """Return whether the second dimension of a layer's input and gradient is the examples."""
        return (
            self._is_time_first
            and isinstance(x, Tensor)
            and g.ndim > 2
            and x.shape[:2] == g.shape[:2]
            and x.shape[1] == self.count != len(x)
        )

    def is_alike(self, x: Tensor) -> bool:
        """Return whether examples share ``x``, such as positions [1, T]: it has no batch."""
        return x.ndim > 1 and len(x) == 1 and self.count != 1


def _is_setting(x: object) -> bool:
    return isinstance(x, Tensor) and not (x.ndim and x.size(0))


def _tensors(inputs: object) -> Iterator[Tensor | list[Tensor] | PackedSequence]:
    """Yield the tensors in nested inputs; a list of tensors and a PackedSequence are one each."""
    match inputs:
        case Tensor() | PackedSequence():
            yield inputs
        case list() if inputs and all(isinstance(x, Tensor) for x in inputs):
            yield inputs
        case list() | tuple():
            for each in inputs:
                yield from _tensors(each)
        case Mapping():
            yield from _tensors(tuple(inputs.values()))


def of_each_example(x: Tensor, node: Node, output: object, count: int) -> Call | None:
    """Find where the gradient of each example arrives, if all examples share an embedding.

    The gradient of the embedding is the sum over the examples. In a sum with a batch, for example
    of embeddings of tokens, the gradient is still that of each example.

    Args:
        x: The input of the embedding.
        node: What made the embedding.
        output: The output of the model.
        count: The examples.

    Returns:
        None if the only use of the embedding is not such a sum.
    """
    users: dict[Node, list[Node]] = {}
    stack = [node for each in _tensors(output) for node in _nodes(each)]
    visited: set[Node] = set()
    while stack:  # a walk without recursion, as graphs can be deeper than Python's stack
        user = stack.pop()
        if user is None or user in visited:
            continue
        visited.add(user)
        for used, _ in user.next_functions:
            if used is not None and (used is node or _is_view(used)):
                users.setdefault(used, []).append(user)
            stack.append(used)
    used = node
    while len(of := users.get(used, [])) == 1 and _is_view(of[0]):
        used = of[0]
    if len(of) != 1 or of[0].name() != "AddBackward0" or of[0]._saved_alpha != 1:  # type: ignore[attr-defined]
        return None
    shape, whole = _shape(used), _shape(of[0])
    shape = (1,) * (len(whole) - len(shape)) + shape
    added = [i for i, (n, m) in enumerate(zip(shape, whole, strict=True)) if n != m]
    if [whole[i] for i in added] != ([count] if count > 1 else []):
        return None
    # If examples and tokens are equally many, the first dimension has the examples.
    if added and added != [0] and whole[0] == count:
        return None
    shape = (count, *x.shape, _shape(node)[-1])
    return Call(
        x.expand(shape[:-1]),
        GradientEdge(of[0], 0),
        lambda g: (g.movedim(added[0], 0) if added else g).reshape(shape),
    )


def _nodes(output: Tensor | list[Tensor] | PackedSequence) -> Iterator[Node | None]:
    for x in [output] if isinstance(output, Tensor) else output:
        if isinstance(x, Tensor):  # a PackedSequence has no indices if it is sorted
            yield x.grad_fn


def _is_view(node: Any) -> bool:
    # Up to torch 2.6, positions[:, None] is a slice of the whole before it is a view.
    if node.name() == "SliceBackward0":
        whole = node._saved_self_sym_sizes
        return bool(_shape(node) == tuple(whole))
    return node.name() in VIEWS


def _shape(node: Node) -> tuple[int, ...]:
    """Return the shape of the tensor that a node has made."""
    return tuple(node._input_metadata[0].shape)
