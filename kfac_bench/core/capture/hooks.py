"""Hooks that see inputs and output gradients of layers while a model trains.

:class:`KFAC` owns one :class:`Capture`. The sums themselves are in :mod:`.moments`; how a layer
reads its input and gradient is in :mod:`kfac_bench.core.layers`. Which passes count is decided in
:mod:`.counted_passes`.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import local
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from kfac_bench.core.capture.calls import (
    OUTSIDE,
    Family,
    RepeatedForwards,
    RowsLayer,
    SeenCall,
    Use,
    next_use,
    product_of,
    rows,
)
from kfac_bench.core.capture.counted_passes import (
    CountedPasses,
    EarlySender,
    is_returned,
    node_of,
    weight_getter,
)
from kfac_bench.core.capture.examples import Examples, of_each_example
from kfac_bench.core.capture.fisher import WaitingCalls
from kfac_bench.core.capture.identity import AssignedGradients, GradientIdentity
from kfac_bench.core.capture.moments import Collected, Forward, Moments
from kfac_bench.core.capture.safe_hooks import (
    EagerForwards,
    ForwardContext,
    SafeHook,
    forward_contexts,
)
from kfac_bench.core.distributed.dtensor import is_sharded, own_samples
from kfac_bench.core.kernels.gram import without_autocast
from kfac_bench.core.layers.base import Layer, OtherForwardError


def _training_hook(
    capture: "Capture", edge: GradientEdge, seen: SeenCall
) -> Callable[[tuple[Tensor | None, ...]], None]:
    """Return a hook that notes when the gradient of the training loss arrives at ``edge``.

    The hook keeps neither the capture nor the module alive.
    """
    weak, name, node = ref(capture), seen.layer.name, seen.weight_node
    output_nr = edge.output_nr

    def hook(grads: tuple[Tensor | None, ...]) -> None:
        if (capture := weak()) is not None:
            capture.passes.includes(name, grads[output_nr], node)

    return hook


class _Running(local):
    """The forwards of the model that have not ended, in each thread."""

    def __init__(self) -> None:
        self.forwards: list[Examples] = []


class Capture:
    """Hooks on the layers, which sum moments of a and g while ``enabled``.

    Both moments are computed when the gradient of the output arrives. A forward without a backward
    therefore counts nothing, and a forward that activation checkpointing repeats counts once. Until
    then the input is kept, which autograd keeps anyway for the weight gradient, except in
    non-reentrant checkpointing. The gradient is read at the node of the graph, because a module
    backward hook breaks in-place activations.

    Only a backward that adds to ``.grad`` of the weight counts. If that ``.grad`` is discarded
    before :meth:`pop`, the moments are discarded as well.

    A call without samples (a head that got no boxes) adds nothing. A layer with only such calls has
    no statistics, as if it had not been used.

    A forward inside a transform of torch.func or inside torch.jit.trace counts nothing: hooks could
    not read its graph.

    torch.compile: hooks would break the graph at each layer. While enabled, the model therefore
    runs eagerly (:class:`.EagerForwards`). At all other steps the whole compiled graph runs.

    Args:
        model: The model that contains the layers, without wrapper.
        layers: The layers whose statistics are wanted.
        moments: What sums the statistics.
        sampled: Whether to ignore the backward of the training loss. Only :meth:`backward` counts
            then.
        sender: Takes moments of complete layers while backward runs. None if all wait for
            :meth:`pop`.
        assigned: Collects statistics of passes of ``torch.autograd.grad``, or None.
        counts_examples: Whether the examples are those of the model, not of each layer's input.

    Attributes:
        identity: Compares the statistics with the gradients; None if ``sampled``.
        left: The names of layers that are left to the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        *,
        moments: Moments,
        sampled: bool = False,
        sender: EarlySender | None = None,
        assigned: AssignedGradients | None = None,
        counts_examples: bool = True,
    ) -> None:
        self.seconds = 0.0
        """Host time in the hooks. The owner resets it."""
        self.has_forward = False
        """True if the model has run with gradients. The owner resets it."""
        self.wrapper: ref[nn.Module] | None = None
        """The DistributedDataParallel that called the model last, perhaps made after K-FAC."""
        self._sampled = sampled
        self._moments, self.sender = moments, sender
        by_name = {layer.name: layer for layer in layers}
        self.passes = CountedPasses(by_name, self._moments, self.sender)
        self.identity = None if sampled else GradientIdentity(layers)
        self.left: set[str] = set()
        self.computed = frozenset(by_name)
        """The names of the layers whose statistics are collected here."""
        self._assigned, self._counts_examples = assigned, counts_examples
        self._running = _Running()
        self._examples: dict[int, Examples] = {}  # by forward that may be repeated
        self._uses: dict[tuple[str, int], int] = {}  # calls by layer and forward
        self._repeated = RepeatedForwards()
        self._waiting = WaitingCalls()  # empty unless ``sampled``
        self.unread: set[str] = set()
        """The names of layers whose inputs or outputs no layer class describes, or that have one
        input for all examples."""
        self._rows_layers: dict[str, RowsLayer] = {}
        self._derived: set[int] = set()  # the numbers of calls whose derivatives have a graph
        self._forward = self._backwards = self._calls = 0
        self._eager = EagerForwards()
        self._handles: list[RemovableHandle] = []
        self._contexts: list[ForwardContext] = []
        try:
            self._add_hooks(model, layers)
        except BaseException:
            self.remove()  # a construction that fails must leave nothing on the model
            raise
        self.enabled = True

    def _add_hooks(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        begin = SafeHook(self._begin_forward)
        self._handles.append(model.register_forward_pre_hook(begin, with_kwargs=True))
        for module in model.modules():
            if hasattr(module, "batch_first"):
                note = SafeHook(self._note_sequence)
                self._handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
        for layer in layers:
            for module in layer.modules:
                hook = SafeHook(partial(self._on_forward, layer, weight_getter(layer, module)))
                # Prepended, so that it sees the module's own input and output. Hooks of FSDP2 and
                # of tensor parallelism run later; they free parameters and change layouts.
                self._handles.append(
                    module.register_forward_hook(hook, with_kwargs=True, prepend=True)
                )
        # Not self: a cycle would keep the factors of a detached KFAC until a garbage collection.
        eager = self._eager
        self._contexts += forward_contexts(layers, lambda: eager.enabled)
        self._handles += self._eager.hooks(model, layers)
        self._handles.append(model.register_forward_hook(SafeHook(self._see_output)))
        end = SafeHook(self._end_forward)
        self._handles.append(model.register_forward_hook(end, always_call=True))

    @property
    def enabled(self) -> bool:
        """True if forwards from now on count."""
        return self._eager.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if value:
            self._eager.enabled = True
        else:
            self._eager.disable()

    def _begin_forward(self, module: nn.Module, args: object, kwargs: object) -> None:
        for context in self._contexts:  # Ctrl-C in a forward leaves them
            context.leave()
        self._forward += 1
        self._waiting.begin_forward()
        self.has_forward |= torch.is_grad_enabled()
        wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
        if wrapper is not None:
            self.wrapper = ref(wrapper)
            if self.sender is not None:
                self.sender.wrapper = self.wrapper
        if self.enabled and self.computed and module.training:
            examples = Examples((args, kwargs) if self._counts_examples else (), self._forward)
            self._running.forwards.append(examples)

    def _note_sequence(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if self._running.forwards:
            self._running.forwards[-1].note_sequence(module, args, kwargs)

    def _see_output(self, module: nn.Module, args: object, output: object) -> None:
        """Look at the output of a forward that has not failed."""
        if self._running.forwards:
            examples = self._running.forwards[-1]
            for seen, edge, undo in examples.lookups:
                moved = of_each_example(seen.x, edge.node, output, examples.count or 1)
                if moved is not None:
                    undo()
                    self._watch(replace(seen, x=moved.x, prepare=moved.prepare), moved.edge)
                elif examples.is_alike(seen.x) or seen.layer.name in self.unread:
                    undo()
                    why = f"got one input for {examples.count} examples"
                    self._leave_out(seen.layer, why, "Repeat the input for each example")

    def _end_forward(self, module: nn.Module, args: object, output: object) -> None:
        if self._running.forwards:
            self._running.forwards.pop().lookups.clear()

    def _on_forward(
        self,
        layer: Layer,
        weight_of: Callable[[nn.Module], Tensor],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> None:
        if not self.enabled or layer.name in self.left:
            return
        if self.passes.paused or not module.training:
            if self.identity is not None and torch.is_grad_enabled():
                self.identity.excuse(layer.name)
            return
        examples = self._running.forwards[-1] if self._running.forwards else None
        newest = self._forward if examples is None else examples.forward
        if not torch.is_grad_enabled():
            # Checkpointing may repeat this call inside backward. If it repeats the whole forward,
            # that is a forward of its own.
            if examples is None or examples.has_gradients:
                self._count_use(layer.name, newest)
                self._repeated.note(layer.name, newest)
                if examples is not None:
                    self._examples[newest] = examples
            return
        if any(isinstance(x, Tensor) and x.is_nested for x in (*args, *kwargs.values(), output)):
            self._leave_out(layer, "got a nested tensor", "Use padded tensors")
            return
        weight = weight_of(module)
        # Frozen, perhaps only for this forward, or replaced by torch.func.functional_call. FSDP2
        # replaces a sharded weight by the whole one.
        is_own = weight is layer.weight or is_sharded(layer.weight)
        if not (weight.requires_grad and isinstance(weight, nn.Parameter) and is_own):
            return
        weight_node = node_of(weight)
        # A layer may have several calls: each projection of an attention module is one.
        forward, repeated_in = self._repeated.origin(layer.name, newest)
        try:
            calls = [*layer.calls(module, args, kwargs, output)]
        except OtherForwardError:
            why = f"({type(module).__name__}) has a forward, input or output of an unknown form"
            self._leave_out(layer, why, "Describe its forward in layer_types")
            return
        if repeated_in != OUTSIDE:
            examples = self._examples.get(forward)
        # Non-reentrant checkpointing repeats a call inside backward for its tensors alone, and no
        # gradient comes for that call.
        is_new = torch._C._current_graph_task_id() == OUTSIDE
        for call in calls:
            self._calls += 1
            origin = layer, call.x, call.prepare, forward, examples, repeated_in, weight_node
            seen = SeenCall(*origin, number=self._calls, family=self._calls)
            if is_new:
                self._count_use(layer.name, forward)
            undo = self._watch(seen, call.edge)
            has_gradient = is_new or repeated_in != OUTSIDE
            if self.sender is not None and has_gradient and not self._sampled:
                self.sender.expect(layer.name, forward)
            if examples is not None and examples.count is not None:
                if layer.is_single(call.x):
                    examples.note_single(call.x)
                is_unread = layer.name in self.unread
                if layer.spec.is_lookup and (is_unread or call.x.shape != examples.shape):
                    examples.lookups.append((seen, call.edge, undo))

    def _watch(self, seen: SeenCall, edge: GradientEdge) -> Callable[[], None]:
        """Wait for the gradient at ``edge``, the output of a use of a layer.

        Returns:
            A function that ends the waiting.
        """
        if (product := product_of(edge, seen)) is not None:
            node, inputs = product
            node.register_hook(partial(self._on_derivative, seen, inputs))
        if self._sampled:
            self._waiting.add(edge, seen)
            return partial(self._waiting.forget, seen)
        hook = partial(self._on_backward, seen, edge.output_nr)
        return edge.node.register_prehook(hook).remove

    def _on_derivative(
        self,
        seen: SeenCall,
        inputs: Sequence[int],
        made: tuple[Tensor | None, ...],
        grads: tuple[Tensor | None, ...],
    ) -> None:
        """Watch the use of a layer in its own backward, if that has a graph."""
        if not torch.is_grad_enabled() or self.passes.paused:
            seen.release()
            return
        with_graph = [x for i in inputs if (x := made[i]) is not None and x.requires_grad]
        if len(with_graph) != 1 or grads[0] is None or is_sharded(grads[0]):
            return
        self._calls += 1
        use = next_use(seen, with_graph[0], grads[0], self._calls)
        if use is not None:
            self._derived.add(seen.family)
            self._watch(use, get_gradient_edge(with_graph[0]))
            if self.sender is not None and not self._sampled:
                self.sender.expect(seen.layer.name, seen.forward)

    def _leave_out(self, layer: Layer, why: str, remedy: str) -> None:
        if self.identity is not None:
            self.identity.excuse(layer.name)
        if layer.name not in self.unread:
            self.unread.add(layer.name)
            warnings.warn(
                f"K-FAC: layer {layer.name!r} {why}, which K-FAC cannot read: the layer is left to "
                f"the optimizer. {remedy} to cover it, or add it to skip",
                stacklevel=2,
            )

    def _count_use(self, name: str, forward: int) -> None:
        use = (name, forward)
        self._uses[use] = self._uses.get(use, 0) + 1

    def _on_backward(
        self, seen: SeenCall, output_nr: int, grads: tuple[Tensor | None, ...]
    ) -> None:
        if (g := grads[output_nr]) is not None:
            self._see(seen, g)
        seen.release()

    def _see(self, seen: SeenCall, g: Tensor) -> None:
        """Add a call to the statistics if the running backward counts."""
        # Calls in the same forward and backward are positions of the same samples.
        backward = seen.repeated_in
        if backward == OUTSIDE:
            backward = torch._C._current_graph_task_id()
        if self.passes.includes(seen.layer.name, g, seen.weight_node):
            if self._assigned is not None:
                self._assigned.ignore(seen.layer)
            self._add(seen, g, (seen.forward, backward))
            if self.sender is not None:
                self.sender.arrived(seen.layer.name, seen.forward)
        elif (
            self._assigned is not None
            and seen.use is Use.CALL
            and not self.passes.paused
            and is_returned(seen.weight_node)
            # With is_grads_batched=True the gradients are several, and no .grad can be all of them.
            and not torch._C._functorch.is_legacy_batchedtensor(g)
        ):
            self._add(seen, g, (seen.forward, backward), is_returned=True)

    def backward(self, output: Tensor, seeds: Iterable[Tensor], magnitude: int) -> None:
        """Send ``seeds`` back from ``output`` to the layers, without changing any ``.grad``.

        Args:
            output: The model's output.
            seeds: Gradients with respect to ``output``, in its shape.
            magnitude: How many times larger the seeds are than gradients of the loss.

        Raises:
            RuntimeError: The model has tensor-parallel layers, whose ranks would draw different
                labels. Or an earlier call has sent labels through the same calls of layers.
        """
        with self.passes.pause(), self._without_averaging():
            self._waiting.check_not_sent(output)
        seen = self._waiting.pop(output)
        edges = [edge for edge, _ in seen]
        if not edges:
            return
        if any(is_sharded(s.x) for _, s in seen):
            raise RuntimeError(
                "fisher=mc and type2 draw different labels on each rank, but tensor-parallel "
                "layers need the same labels: use fisher=empirical"
            )
        self._backwards += 1
        # Inside pause(), because checkpointing may repeat forwards during backward.
        with self.passes.pause(), self._without_averaging():
            for i, seed in enumerate(seeds):
                grads = torch.autograd.grad(
                    output, edges, seed, retain_graph=True, allow_unused=True
                )
                for (edge, s), g in zip(seen, grads, strict=True):
                    if g is not None:
                        self._add(s, g, (s.forward, self._backwards), magnitude, first=i == 0)
                    if i == 0 and g is not None:
                        self._waiting.note_sent(edge, s.layer.name)
                        edge.node.register_prehook(_training_hook(self, edge, s))
                self._moments.end_backward(first=i == 0)
        if self.sender is not None:
            later = self._waiting.layers()
            self.sender.finish({s.layer.name for _, s in seen}.difference(later))

    @contextmanager
    def _without_averaging(self) -> Iterator[None]:
        """Let a backward inside the block start no average of DistributedDataParallel.

        With ``static_graph=True``, the first backward from the output of the wrapper starts it.
        """
        wrapper = None if self.wrapper is None else self.wrapper()
        name = "_static_graph_delay_allreduce_enqueued"
        is_first = getattr(wrapper, name, None) is False
        if is_first:
            setattr(wrapper, name, True)
        try:
            yield
        finally:
            if is_first:
                setattr(wrapper, name, False)

    def _add(
        self,
        seen: SeenCall,
        g: Tensor,
        forward: Forward,
        magnitude: int = 0,
        *,
        first: bool = True,
        is_returned: bool = False,
    ) -> None:
        """Add a call to the moments, or to those of :class:`AssignedGradients`.

        If ``magnitude`` is not 0, g comes from a seed, which :meth:`Moments.add` scales.
        """
        if self.sender is not None:
            self.sender.check_not_sent(seen.layer.name)
        if not g.numel():
            return
        start = time.perf_counter()
        with torch.no_grad(), without_autocast(g):
            g = g.detach()  # with create_graph=True it has a graph, which must not live on
            x, g = seen.x, g if seen.prepare is None else seen.prepare(g)
            count = None if seen.examples is None else seen.examples.count
            has_uses = seen.family in self._derived
            may_be_time_first = seen.layer.may_be_time_first and not has_uses
            if may_be_time_first and seen.examples and seen.examples.is_time_first(x, g):
                x, g = x.transpose(0, 1), g.transpose(0, 1)
            alone = self._uses.get((seen.layer.name, seen.forward)) == 1
            if is_returned and self._assigned is not None:
                self._assigned.add(seen.layer, x, g, forward, examples=count, alone=alone)
                return
            if has_uses:
                self._add_use(seen, g, forward, count, magnitude)
                self.seconds += time.perf_counter() - start
                return
            if is_sharded(g):
                self._moments.count_loss_samples(seen.layer, g, forward)
                x, g = own_samples(x, g)
                if not g.numel():
                    return
            elif self.identity is not None:
                self.identity.add(seen.layer, seen.weight_node, x, g)
            self._moments.add(
                seen.layer,
                x,
                g,
                forward,
                examples=count,
                magnitude=magnitude,
                first=first,
                alone=alone,
            )
        self.seconds += time.perf_counter() - start

    def _add_use(
        self, seen: SeenCall, g: Tensor, forward: Forward, examples: int | None, magnitude: int
    ) -> None:
        layer = self._rows_layers.setdefault(seen.layer.name, RowsLayer(seen.layer))
        use = rows(seen, g)
        if self.identity is not None:
            self.identity.add(layer, seen.weight_node, *use[1:])
        family = Family(layer, forward, examples, magnitude)
        self._moments.add_use(seen.family, use, family)

    def pop(self) -> dict[str, Collected]:
        """Return the moments since the last call, by layer, and start again.

        Layers that were not used are missing.
        """
        self.passes.end()
        if self.identity is not None:
            self.identity.end_step()
        self._waiting.clear()
        self._uses.clear()
        self._derived.clear()
        self._repeated.clear()
        self._examples.clear()
        self._running.forwards.clear()  # Ctrl-C in a forward leaves something
        start = time.perf_counter()
        collected = self._moments.pop()
        self.seconds += time.perf_counter() - start
        if self.sender is not None:
            collected |= {k: v for k, v in self.sender.pop().items() if v is not None}
        if self._assigned is not None:
            collected = self._assigned.pop() | collected
        return collected

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.enabled = False  # a forward that Ctrl-C ended may have left compiled models eager

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self.enabled = False
        for handle in self._handles:
            handle.remove()
        for context in self._contexts:
            context.remove()
