"""Hooks that see inputs and output gradients of layers while a model trains.

:class:`KFAC` owns one :class:`Capture`. The sums themselves are in :mod:`.moments`; how a layer
reads its input and gradient is in :mod:`kfac_bench.core.layers`.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from kfac_bench.core.capture.forward_context import context_hooks
from kfac_bench.core.capture.moments import Collected, Moments
from kfac_bench.core.capture.safe_hook import SafeHook, run_eagerly
from kfac_bench.core.distributed.dtensor import is_sharded, own_samples
from kfac_bench.core.layers.base import Layer


@dataclass(frozen=True, slots=True)
class _Seen:
    """A use of a layer in a forward, whose gradient has not come yet.

    The node in autograd's graph refers to this object. A reference back would be a cycle, which
    holds all activations until Python's garbage collection runs.
    """

    layer: Layer
    x: Tensor
    prepare: Callable[[Tensor], Tensor] | None
    forward: int


def _same(saved: Tensor) -> Tensor:
    return saved


class Capture:
    """Hooks on the layers, which sum moments of a and g while ``enabled``.

    Both moments are computed when the gradient of the output arrives. A forward without a backward
    therefore counts nothing, and a forward that activation checkpointing repeats counts once. Until
    then the input is kept, which autograd keeps anyway for the weight gradient. The gradient is
    read at the node of the graph, because a module backward hook breaks in-place activations.

    A call without samples (a head that got no boxes) adds nothing. A layer with only such calls has
    no statistics, as if it had not been used.

    torch.compile: hooks would break the graph at each layer. While enabled, compiled models
    therefore run eagerly. At all other steps the whole compiled graph runs.

    Args:
        model: The model that contains the layers, without wrapper.
        layers: The layers whose statistics are wanted.
        moments: What sums the statistics.
        sampled: Whether to ignore the backward of the training loss. Only :meth:`backward` counts
            then.
        on_complete: Called during backward each time a layer has received the gradients of all its
            uses. Its argument holds the moments of all complete layers. It is not called while
            ``accumulating`` or ``is_last`` say that more backwards will follow. Layers that never
            become complete (the loss did not need their output) are left to :meth:`pop`.
        is_last: Returns whether the running backward is the last one before :meth:`pop`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        *,
        moments: Moments,
        sampled: bool = False,
        on_complete: Callable[[Mapping[str, Collected | None]], None] | None = None,
        is_last: Callable[[], bool] = lambda: True,
    ) -> None:
        self.seconds = 0.0
        """Host time in the hooks. The owner resets it."""
        self._sampled = sampled
        self._moments = moments
        self.accumulating = False
        """Whether more backwards will follow before :meth:`pop`. The owner sets it."""
        self._on_complete, self._is_last = on_complete, is_last
        self._complete: dict[str, Collected | None] = {}
        self._pending: Counter[str] = Counter()  # uses without gradient yet, by layer
        self._uses: dict[tuple[str, int], int] = {}  # calls by layer and forward
        self._loss_samples: dict[
            str, dict[object, int]
        ] = {}  # by layer and forward, if ranks share them
        self._seen: list[tuple[GradientEdge, _Seen]] = []
        self._forward = self._backwards = 0
        self._enabled = self._paused = False
        self._handles = [model.register_forward_pre_hook(SafeHook(self._count_forward))]
        self._handles += [
            # Prepended, so that it sees the module's own input and output. Hooks of FSDP2 and of
            # tensor parallelism run later; they free parameters and change layouts.
            module.register_forward_hook(
                SafeHook(partial(self._on_forward, layer)), with_kwargs=True, prepend=True
            )
            for layer in layers
            for module in layer.modules
        ]
        self._holding: list[saved_tensors_hooks] = []
        for module in {m: None for x in layers if x.reads_saved_tensors for m in x.modules}:
            release = SafeHook(self._release)
            self._handles += [
                module.register_forward_pre_hook(SafeHook(self._hold)),
                module.register_forward_hook(release, always_call=True),
            ]
        self._handles += context_hooks(layers, lambda: self._enabled)
        self.enabled = True

    @property
    def enabled(self) -> bool:
        """Whether forwards from now on count."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if value != self._enabled:
            self._enabled = value
            run_eagerly(value)

    def _count_forward(self, module: nn.Module, inputs: object) -> None:
        self._forward += 1

    def _hold(self, module: nn.Module, inputs: object) -> None:
        """Keep what autograd saves readable: checkpointing would allow a single read only."""
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        # A hook that returns the tensor itself hides the hooks of checkpointing from this module.
        if hooked and self._enabled and module.training:
            self._holding.append(saved_tensors_hooks(_same, _same))
            self._holding[-1].__enter__()

    def _release(self, module: nn.Module, inputs: object, output: object) -> None:
        if self._holding:
            self._holding.pop().__exit__()

    def _on_forward(
        self,
        layer: Layer,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> None:
        if self._paused or not (self._enabled and module.training and torch.is_grad_enabled()):
            return
        # A layer may have several calls: each projection of an attention module is one.
        for call in layer.calls(module, args, kwargs, output):
            seen = _Seen(layer, call.x, call.prepare, self._forward)
            use = (layer.name, self._forward)
            self._uses[use] = self._uses.get(use, 0) + 1
            if self._sampled:
                self._seen.append((call.edge, seen))
            else:
                self._pending[layer.name] += 1
                hook = partial(self._on_backward, seen, call.edge.output_nr)
                call.edge.node.register_prehook(hook)

    def _on_backward(self, seen: _Seen, output_nr: int, grads: tuple[Tensor | None, ...]) -> None:
        g = grads[output_nr]
        if g is not None:
            # Calls in the same forward and backward are positions of the same samples.
            backward = torch._C._current_graph_task_id()
            self._add(seen, g, (seen.forward, backward))
            self._pending[seen.layer.name] -= 1
            if not self._pending[seen.layer.name]:
                self._finish([seen.layer.name])

    def _finish(self, names: Iterable[str]) -> None:
        """Hand over complete layers, unless more backwards will follow."""
        if self._on_complete is None or self.accumulating or not self._is_last():
            return
        with torch.no_grad():
            self._complete.update((name, self._moments.take(name)) for name in names)
            self._on_complete(self._complete)

    def backward(self, output: Tensor, seeds: Iterable[Tensor], magnitude: int) -> None:
        """Send ``seeds`` back from ``output`` to the layers, without changing any ``.grad``.

        Args:
            output: The model's output.
            seeds: Gradients with respect to ``output``, in its shape.
            magnitude: How many times larger the seeds are than gradients of the loss.

        Raises:
            RuntimeError: The model has tensor-parallel layers. Their ranks would draw different
                labels.
        """
        seen, self._seen = self._seen, []
        edges = [edge for edge, _ in seen]
        if not edges:
            return
        if any(is_sharded(s.x) for _, s in seen):
            raise RuntimeError(
                "fisher=mc and type2 draw different labels on each rank, but tensor-parallel "
                "layers need the same labels: use fisher=empirical"
            )
        self._backwards += 1
        self._paused = True  # checkpointing may repeat forwards during backward
        try:
            for i, seed in enumerate(seeds):
                grads = torch.autograd.grad(
                    output, edges, seed, retain_graph=True, allow_unused=True
                )
                for (edge, s), g in zip(seen, grads, strict=True):
                    if g is not None:
                        self._add(s, g, (s.forward, self._backwards), magnitude, first=i == 0)
                    elif i == 0:
                        self._seen.append((edge, s))  # its layer feeds another output
                self._moments.end_backward(first=i == 0)
        finally:
            self._paused = False
        later = {s.layer.name for _, s in self._seen}
        self._finish({s.layer.name for _, s in seen}.difference(later))

    def _add(
        self, seen: _Seen, g: Tensor, forward: object, magnitude: int = 0, *, first: bool = True
    ) -> None:
        if seen.layer.name in self._complete:
            raise RuntimeError(
                f"overlap=True: {seen.layer.name} got a gradient after its statistics were sent; "
                "run all backwards of a step but the last inside accumulate(), or use overlap=False"
            )
        if not g.numel():
            return
        start = time.perf_counter()
        with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
            x, g = seen.x, g if seen.prepare is None else seen.prepare(g)
            if is_sharded(g):
                samples = len(g) if g.ndim > 1 else 1
                self._loss_samples.setdefault(seen.layer.name, {})[forward] = samples
                x, g = own_samples(x, g)
                if not g.numel():
                    return
            self._moments.add(
                seen.layer,
                x,
                g,
                forward,
                # The seeds are scaled to a loss that is a sum over the samples of this forward.
                scale=(lambda samples: samples / magnitude) if magnitude else None,
                first=first,
                alone=self._uses.get((seen.layer.name, seen.forward)) == 1,
            )
        self.seconds += time.perf_counter() - start

    def pop(self) -> dict[str, Collected]:
        """Return what was collected since the last call, by layer, and start again.

        Layers that were not used are missing.
        """
        self._seen.clear()
        self._uses.clear()
        self._pending.clear()
        complete, self._complete = self._complete, {}
        start = time.perf_counter()
        collected = self._moments.pop()
        self.seconds += time.perf_counter() - start
        collected |= {k: v for k, v in complete.items() if v is not None}
        for name, new in collected.items():
            if name in self._loss_samples:
                new.loss_samples = sum(self._loss_samples[name].values())
        self._loss_samples.clear()
        return collected

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.enabled = False  # else compiled models would stay eager

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self.enabled = False
        for handle in self._handles:
            handle.remove()
