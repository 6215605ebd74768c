"""Which backward passes change ``.grad`` of a layer, and whether that change was discarded later.

A statistic belongs to the gradient of the same pass. :mod:`.counted_passes` asks here whether a
running backward reaches ``.grad``, and whether the gradient of an earlier pass still exists.
Nothing here reads from the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.weak import TensorWeakRef

from kfac_bench.core.distributed.deepspeed_zero import takes_gradient
from kfac_bench.core.distributed.dtensor import local
from kfac_bench.core.layers.base import Layer


def weight_getter(layer: Layer, module: nn.Module) -> Callable[[nn.Module], Tensor]:
    """Return a function from ``module`` to the weight that ``module`` uses at that moment.

    FSDP2 and ``torch.func.functional_call`` replace the weight while the module runs. So the weight
    is found by its name.
    """
    names = [name for name, p in module.named_parameters() if p is layer.weight]
    return attrgetter(names[0]) if names else lambda module: layer.weight


def node_of(weight: Tensor) -> Node:
    """Return the node of autograd's graph that adds to ``.grad`` of ``weight``."""
    return get_gradient_edge(weight).node


def will_run(node: Node) -> bool:
    """Return whether the running backward will add to ``.grad`` at ``node``."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # torch.autograd.grad with respect to this weight returns the gradient instead.
        return False


def is_returned(node: Node) -> bool:
    """Return whether the running ``torch.autograd.grad`` returns the gradient of a weight."""
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True
    return False


@dataclass(frozen=True, slots=True)
class _Mark:
    """What ``.grad`` was when a backward had ended."""

    grad: TensorWeakRef
    version: int


class GradientWatch:
    """Remembers ``.grad`` of layers at the end of a backward, and compares it later.

    ``zero_grad()`` removes ``.grad``, or fills it with zeros. Both discard the gradient. Clipping,
    unscaling and averaging over ranks change ``.grad`` in place and keep it. The gradient of a
    backward that raised an exception counts as discarded.
    """

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}
        self._failed: set[str] = set()  # layers that a backward had reached when it failed
        self._reached: dict[int, dict[str, Layer]] = {}  # by graph task, while it runs

    @property
    def has_marks(self) -> bool:
        """Whether gradients are remembered."""
        return bool(self._marks)

    def expect(self, layer: Layer) -> None:
        """Note that the running backward adds to ``.grad`` of the layer."""
        task = torch._C._current_graph_task_id()
        if task not in self._reached:
            self._reached[task] = {}
            # Wrappers queue callbacks too, which average gradients. Queueing twice waits for them.
            queue = Variable._execution_engine.queue_callback
            mark = partial(self._mark, task)
            queue(partial(queue, mark))
            # A backward that fails runs no callback. It only frees the callbacks.
            finalize(mark, self._fail, task).atexit = False
        self._reached[task][layer.name] = layer

    def _mark(self, task: int) -> None:
        for layer in self._reached.pop(task, {}).values():
            self._remember(layer)

    def _fail(self, task: int) -> None:
        self._failed.update(self._reached.pop(task, {}))

    def _remember(self, layer: Layer) -> None:
        # Without a .grad, a framework keeps the gradient elsewhere: FSDP2 between micro-batches.
        self._marks.pop(layer.name, None)
        if layer.weight.grad is not None and not takes_gradient(layer.weight):
            grad = layer.weight.grad
            self._marks[layer.name] = _Mark(TensorWeakRef(grad), _version(grad))

    def is_removed(self, layer: Layer) -> bool:
        """Return whether the gradient of the last backward is no longer in ``.grad``."""
        if layer.name in self._failed:
            return True
        return layer.name in self._marks and layer.weight.grad is None

    def zeroed(self, layer: Layer) -> Tensor | None:
        """Return whether ``.grad`` was filled with zeros, as a bool on the device.

        None if ``.grad`` is as it was, so that it cannot have been.
        """
        mark, grad = self._marks.get(layer.name), layer.weight.grad
        if mark is None or grad is None:
            return None
        # Another tensor may have the same gradient: DDP moves gradients to other buckets.
        if mark.grad() is grad and mark.version == _version(grad):
            return None
        self._remember(layer)
        part = local(grad)
        return ~part.any() if part.numel() else None

    def forget(self, layer: Layer) -> None:
        """Forget the gradient of one layer: its statistics are discarded."""
        self._marks.pop(layer.name, None)
        self._failed.discard(layer.name)

    def clear(self) -> None:
        """Forget all gradients: their statistics are used."""
        self._marks.clear()
        self._failed.clear()
        self._reached.clear()


def _version(grad: Tensor) -> int:
    """Return a number that grows with each change in place."""
    with torch.no_grad():
        # Of a DTensor, operations count at the DTensor, and FSDP2's sums at the rank's part.
        return grad._version + local(grad)._version
