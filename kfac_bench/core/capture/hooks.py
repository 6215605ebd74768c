"""Hooks that see what goes through the layers while a model trains."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from kfac_bench.core.capture.moments import Collected, Eigenbasis, Moments
from kfac_bench.core.distributed.dtensor import is_sharded, own_samples
from kfac_bench.core.layers.base import Layer


@dataclass(frozen=True, slots=True)
class _Seen:
    """A call whose gradient has not come yet.

    It does not know its node in the graph, which knows it: that would be a cycle that holds all
    activations until Python's garbage collection.
    """

    layer: Layer
    x: Tensor
    prepare: Callable[[Tensor], Tensor] | None
    forward: int


def no_hook(*args: object, **kwargs: object) -> None:
    """What a copied or unpickled hook becomes: K-FAC stays with the model it was given."""


def _same(saved: Tensor) -> Tensor:
    return saved


def _unpickled() -> Callable[..., None]:
    return no_hook


class _Hook:
    """A hook that copies and pickles as :func:`no_hook`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _unpickled, ()


_eager: list[AbstractContextManager[Any]] = []
"""One entry per enabled capture: the first set the stance, the last sets it back."""


def _run_eagerly(change: int) -> None:
    if change > 0:
        stance = nullcontext() if _eager else torch.compiler.set_stance("force_eager")
        _eager.append(stance)
        return
    stance = _eager.pop(-1 if len(_eager) > 1 else 0)
    stance.__exit__(None, None, None)  # back to the stance before


class Capture:
    """Hooks on the layers that sum moments while ``enabled``.

    Both moments are computed when the gradient of the output arrives, so a forward without a
    backward counts nothing and one recomputed by activation checkpointing counts once. The input
    that is held until then is the one autograd holds for the weight gradient. The gradient is
    read at the graph's node: a module backward hook breaks before in-place activations.

    With ``sampled``, the training loss' backward is ignored: :meth:`backward` is what counts.

    With ``on_complete``, it is called in the backward pass whenever a layer has got a gradient for
    each of its uses, with the moments of all layers that have; but not where ``accumulating`` or
    ``is_last`` say that more backwards will come before :meth:`pop`. Layers whose gradients do not
    all come (an output that the loss did not need, a forward that checkpointing ran anew) are left
    to ``pop``.

    A call of no samples (a head that a step brought no boxes) adds nothing; a layer that had no
    other in the step has no statistics, as if it had not been used.

    torch.compile: hooks would break the graph at each layer. Instead, while enabled, compiled
    models run eagerly; at all other steps the compiled graph runs, whole.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        *,
        reduce: bool = False,
        sampled: bool = False,
        eigenbasis: Eigenbasis = lambda name: None,
        on_complete: Callable[[Mapping[str, Collected | None]], None] | None = None,
        is_last: Callable[[], bool] = lambda: True,
    ) -> None:
        self.seconds = 0.0  # host time in the hooks since it was last set to 0
        self._sampled = sampled
        self._moments = Moments(reduce=reduce, eigenbasis=eigenbasis)
        self.accumulating = False
        """Set by the user: more backwards will come."""
        self._on_complete, self._is_last = on_complete, is_last
        self._complete: dict[str, Collected | None] = {}
        self._pending: Counter[str] = Counter()  # uses whose gradient has not come, by layer
        self._uses: dict[tuple[str, int], int] = {}  # calls by layer and forward
        self._loss_samples: dict[str, dict[object, int]] = {}  # by layer and forward, if shared out
        self._seen: list[tuple[GradientEdge, _Seen]] = []
        self._forward = self._backwards = 0
        self._enabled = self._paused = False
        self._handles = [model.register_forward_pre_hook(_Hook(self._count_forward))]
        self._handles += [
            # first, so that it sees what the module itself was given and made: FSDP2's and tensor
            # parallel's own hooks then put parameters away and change layouts
            module.register_forward_hook(
                _Hook(partial(self._on_forward, layer)), with_kwargs=True, prepend=True
            )
            for layer in layers
            for module in layer.modules
        ]
        self._holding: list[saved_tensors_hooks] = []
        for module in {m: None for x in layers if x.reads_saved_tensors for m in x.modules}:
            release = _Hook(self._release)
            self._handles += [
                module.register_forward_pre_hook(_Hook(self._hold)),
                module.register_forward_hook(release, always_call=True),
            ]
        self.enabled = True

    @property
    def enabled(self) -> bool:
        """Whether the next backward counts."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if value != self._enabled:
            self._enabled = value
            _run_eagerly(1 if value else -1)

    def _count_forward(self, module: nn.Module, inputs: object) -> None:
        self._forward += 1

    def _hold(self, module: nn.Module, inputs: object) -> None:
        """What autograd saves stays as it is: checkpointing would let it be read only once."""
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
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
            # calls of one forward and backward are positions of the same samples
            backward = torch._C._current_graph_task_id()
            self._add(seen, g, (seen.forward, backward))
            self._pending[seen.layer.name] -= 1
            if not self._pending[seen.layer.name]:
                self._finish([seen.layer.name])

    def _finish(self, names: Iterable[str]) -> None:
        """No more gradients of these layers will come before :meth:`pop`, if this is the last."""
        if self._on_complete is None or self.accumulating or not self._is_last():
            return
        with torch.no_grad():
            self._complete.update((name, self._moments.take(name)) for name in names)
            self._on_complete(self._complete)

    def backward(self, output: Tensor, seeds: Iterable[Tensor], magnitude: int) -> None:
        """Send ``seeds`` back from ``output`` to the layers; no ``.grad`` is touched.

        They are ``magnitude`` times the gradients of the loss.
        """
        seen, self._seen = self._seen, []
        edges = [edge for edge, _ in seen]
        if not edges:
            return
        if any(is_sharded(s.x) for _, s in seen):
            raise RuntimeError(
                "fisher=mc and type2 draw labels at random, other ones on each rank, but "
                "tensor-parallel layers need the same: use fisher=empirical"
            )
        self._backwards += 1
        self._paused = True  # checkpointing may run forwards anew
        try:
            for i, seed in enumerate(seeds):
                grads = torch.autograd.grad(
                    output, edges, seed, retain_graph=True, allow_unused=True
                )
                for (edge, s), g in zip(seen, grads, strict=True):
                    if g is not None:
                        self._add(s, g, (s.forward, self._backwards), magnitude, first=i == 0)
                    elif i == 0:
                        self._seen.append((edge, s))  # belongs to another output
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
                "run all backwards of a step but the last within accumulate(), or use overlap=False"
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
                # to the scale of a loss that is a sum over this forward's samples
                scale=(lambda samples: samples / magnitude) if magnitude else None,
                first=first,
                alone=self._uses.get((seen.layer.name, seen.forward)) == 1,
            )
        self.seconds += time.perf_counter() - start

    def pop(self) -> dict[str, Collected]:
        """What was collected since the last call, by layer; layers not used are missing."""
        self._seen.clear()
        self._uses.clear()
        self._pending.clear()
        complete, self._complete = self._complete, {}
        collected = self._moments.pop() | {k: v for k, v in complete.items() if v is not None}
        for name, new in collected.items():
            if name in self._loss_samples:
                new.loss_samples = sum(self._loss_samples[name].values())
        self._loss_samples.clear()
        return collected

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.enabled = False  # compiled models of the process shall not stay eager

    def remove(self) -> None:
        """Take the hooks off the model."""
        self.enabled = False
        for handle in self._handles:
            handle.remove()
