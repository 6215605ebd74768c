"""Calls of layers whose gradients have not come yet."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from kfac_bench.core.capture.examples import Examples
from kfac_bench.core.layers.base import Layer


class Use(Enum):
    """How a layer's W is used: see :mod:`.derivatives`."""

    CALL = "W a + b"
    BACKWARD = "W^T g"
    FORWARD = "W v"


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
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


class WaitingCalls:
    """The calls that wait for :meth:`KFAC.fisher_backward`. They are gone with their graph.

    A forward whose output is dropped, for example a rollout, thus leaves nothing in memory.
    """

    def __init__(self) -> None:
        self._calls: WeakSet[SeenCall] = WeakSet()
        self._key = f"kfac_bench {id(self)}"
        self._sent: list[tuple[GradientEdge, str]] = []  # calls of this forward that got labels

    def add(self, edge: GradientEdge, call: SeenCall) -> None:
        """Let the node of the graph hold the call."""
        _metadata(edge.node).setdefault(self._key, []).append((edge.output_nr, call))
        self._calls.add(call)

    def forget(self, call: SeenCall) -> None:
        """Forget one call."""
        self._calls.discard(call)

    def take(self, output: Tensor) -> list[tuple[GradientEdge, SeenCall]]:
        """Return and forget the calls that lead to ``output``, in their order."""
        stack, visited, taken = [output.grad_fn], set(), []
        while stack:  # a walk without recursion, as graphs can be deeper than Python's stack
            node = stack.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            for output_nr, call in _metadata(node).pop(self._key, ()):
                if call in self._calls:  # else it belongs to an earlier step
                    taken.append((GradientEdge(node, output_nr), call))
                    self._calls.discard(call)
            stack += [following for following, _ in node.next_functions]
        return sorted(taken, key=lambda each: each[1].number)

    def note_sent(self, edge: GradientEdge, name: str) -> None:
        """Note that labels were sent through a call of a layer."""
        self._sent.append((edge, name))

    def check_not_sent(self, output: Tensor) -> None:
        """Check that no layer of this forward gets labels twice: A would count once, G partly.

        Raises:
            RuntimeError: A layer would.
        """
        if not self._sent:
            return
        edges = [edge for edge, _ in self._sent]
        grads = torch.autograd.grad(
            output, edges, torch.zeros_like(output), retain_graph=True, allow_unused=True
        )
        twice = [name for (_, name), g in zip(self._sent, grads, strict=True) if g is not None]
        if twice:
            raise RuntimeError(
                f"fisher_backward() has reached layer {twice[0]!r} twice in one forward: join the "
                "outputs into one tensor and call it once, or use fisher=empirical"
            )

    def begin_forward(self) -> None:
        """Forget the calls of the forward before that got labels."""
        self._sent.clear()

    def layers(self) -> set[str]:
        """Return the names of layers whose calls wait: they feed another output."""
        return {call.layer.name for call in self._calls}

    def clear(self) -> None:
        """Forget all calls: a step has ended."""
        self._calls.clear()
        self._sent.clear()


def _metadata(node: Node) -> dict[str, Any]:
    metadata: Any = node.metadata  # a property, which torch's types call a method
    return metadata  # type: ignore[no-any-return]
