"""The backward passes that count; statistics of other passes are not computed, or are discarded.

A statistic belongs to the gradient of the same pass. :class:`GradientWatch` says whether a running
backward reaches ``.grad``, and whether the gradient of an earlier pass still exists. With
``KFAC(overlap=True)`` an :class:`EarlySender` sends statistics while backward still runs; what it
has sent cannot be discarded on this rank alone. Nothing here reads from the device.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.weak import TensorWeakRef

from kfac_bench.core.capture.moments import Collected, Moments
from kfac_bench.core.distributed.deepspeed_zero import takes_gradient
from kfac_bench.core.distributed.dtensor import local, version_of
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
    return not is_returned(node) and torch._C._will_engine_execute_node(node)


def is_returned(node: Node) -> bool:
    """Return whether the running ``torch.autograd.grad`` returns the gradient of a weight."""
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd does not say whether it executes such a node
        return True
    return False


@dataclass(frozen=True, slots=True)
class _Mark:
    """A reference to ``.grad`` at the end of a backward."""

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
        """True if gradients are remembered."""
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
            self._marks[layer.name] = _Mark(TensorWeakRef(grad), version_of(grad))

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
        if mark.grad() is grad and mark.version == version_of(grad):
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


class EarlySender:
    """Sends the moments of layers that have received the gradients of all their uses.

    Layers that never become complete (the loss did not need their output) stay in ``moments``.

    Args:
        moments: The sums of all layers.
        on_complete: Called during backward each time a layer is complete. Its argument holds the
            moments of all complete layers. It is not called while ``accumulating`` or the wrapper
            say that more backwards will follow.
        on_void: Called if gradients are discarded although their moments may have been sent,
            on this rank or on another one.
        wrapper: The model as K-FAC got it.
    """

    def __init__(
        self,
        moments: Moments,
        on_complete: Callable[[Mapping[str, Collected | None]], None],
        on_void: Callable[[], None],
        wrapper: ref[nn.Module],
    ) -> None:
        self.accumulating = False
        """True if more backwards will follow. The owner sets it."""
        self._moments = moments
        self._on_complete, self._on_void = on_complete, on_void
        self.wrapper = wrapper
        """The model or its DistributedDataParallel, whose flag is False inside ``no_sync()``. The
        hooks set it, because the wrapper may be made after K-FAC."""
        self._pending: Counter[str] = Counter()  # uses without gradient yet, by layer
        # Forwards of which a gradient has come, and expected ones of which none has come. Moments
        # know the examples of a forward only from its gradients.
        self._known: set[int] = set()
        self._unknown: set[int] = set()
        self._ready: list[str] = []  # complete layers that wait for unknown forwards
        self._complete: dict[str, Collected | None] = {}
        self._has_begun = self._is_void = False

    def expect(self, name: str, forward: int) -> None:
        """Wait for the gradient of a further use of a layer, in the forward with this number."""
        self._pending[name] += 1
        if forward not in self._known:
            self._unknown.add(forward)

    def arrived(self, name: str, forward: int) -> None:
        """Count a gradient that :meth:`expect` announced. Send layers that are complete now.

        Nothing is sent before each forward has a gradient: a statistic of G counts the examples of
        all forwards of the backward, also of those that do not use the layer.
        """
        self._known.add(forward)
        self._unknown.discard(forward)
        self._pending[name] -= 1
        if not self._pending[name]:
            self._ready.append(name)
        ready = []
        if not self._unknown:
            ready, self._ready = [n for n in self._ready if not self._pending[n]], []
        self.finish(ready)

    def finish(self, names: Iterable[str]) -> None:
        """Send complete layers, unless more backwards will follow."""
        is_last = getattr(self.wrapper(), "require_backward_grad_sync", True)
        if self.accumulating or self._is_void or not is_last:
            return
        # Also without complete layers: all ranks must agree, and others may have complete layers.
        self._has_begun = True
        with torch.no_grad():
            complete = {name: self._moments.pop_layer(name) for name in names}
            if complete:
                self._complete |= complete
                self._on_complete(self._complete)

    def check_not_sent(self, name: str) -> None:
        """Check that nothing of a layer was sent before its next gradient.

        Raises:
            RuntimeError: The layer was sent.
        """
        if name in self._complete:
            raise RuntimeError(
                f"overlap=True: {name} got a gradient after its statistics were sent; "
                "run all backwards of a step but the last inside accumulate(), or use overlap=False"
            )

    def is_sent(self, name: str) -> bool:
        """Return whether the layer was sent."""
        return name in self._complete

    def discard(self) -> None:
        """Undo everything: gradients of some layers were discarded."""
        if self._has_begun and not self._is_void:
            self._is_void = True
            for name in self._complete:
                self._moments.forget(name)
            self._complete.clear()
            self._on_void()

    def pop(self) -> dict[str, Collected | None]:
        """Return the moments that were sent since the last call, and start again."""
        complete, self._complete = self._complete, {}
        self._pending.clear()
        self._known.clear()
        self._unknown.clear()
        self._ready.clear()
        self._has_begun = self._is_void = False
        return complete


class CountedPasses:
    """Lets a pass count if its gradient is added to ``.grad`` of the weight and stays there.

    Args:
        layers: All layers, by name.
        moments: Their sums.
        sender: What has left during backward already, or None.
    """

    def __init__(
        self, layers: Mapping[str, Layer], moments: Moments, sender: EarlySender | None
    ) -> None:
        self._layers, self._moments, self._sender = layers, moments, sender
        self._watch = GradientWatch()
        self._pauses = 0
        self._has_paused = False
        self.had_pause = False
        """True if a pass was left out in the step that has ended."""

    @property
    def paused(self) -> bool:
        """True if the program is inside :meth:`pause`."""
        return self._pauses > 0

    @property
    def has_gradients(self) -> bool:
        """True if a backward that counts has left gradients since the last :meth:`end`."""
        return self._watch.has_marks

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let forwards and backwards inside the block leave nothing."""
        # A backward inside the block may make a new .grad, which hides that an old one is gone.
        self.forget_discarded(self._layers.values())
        self._pauses += 1
        self._has_paused = True
        try:
            yield
        finally:
            self._pauses -= 1

    def includes(self, name: str, g: Tensor | None, weight_node: Node) -> bool:
        """Return whether the running backward counts for a layer that it has reached with ``g``.

        This is called before the gradient is added to ``.grad``.
        """
        if g is None or self._pauses or not will_run(weight_node):
            return False
        layer = self._layers[name]
        self.forget_discarded([layer])
        self._watch.expect(layer)
        return True

    def forget_discarded(self, layers: Iterable[Layer]) -> None:
        """Forget the moments of layers whose ``.grad`` was discarded after their last backward."""
        for layer in layers:
            if self._watch.is_removed(layer):
                self._forget(layer)
            elif (zeroed := self._watch.zeroed(layer)) is not None:
                if not self._is_sent(layer):
                    self._moments.forget_where(layer.name, zeroed)
                elif zeroed:  # what was sent cannot wait for the device to decide
                    self._forget(layer)

    def end(self) -> None:
        """Forget moments whose gradients are gone before the step; then start again."""
        for layer in self._layers.values():
            # What was sent stays, because other ranks have it.
            if not self._is_sent(layer) and self._watch.is_removed(layer):
                self._forget(layer)
        self._watch.clear()
        self.had_pause, self._has_paused = self._has_paused, False

    def _is_sent(self, layer: Layer) -> bool:
        return self._sender is not None and self._sender.is_sent(layer.name)

    def _forget(self, layer: Layer) -> None:
        self._moments.forget(layer.name)
        self._watch.forget(layer)
        if self._sender is not None:
            self._sender.discard()
