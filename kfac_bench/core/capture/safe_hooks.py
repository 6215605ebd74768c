"""Hooks that disturb no copies, pickles, checkpoints, torch.compile and torch.func.

:mod:`.hooks` uses them. A :class:`ForwardContext` runs the forward of a module inside a context, at
steps that collect statistics.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import get_ident, local
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from kfac_bench.core.layers.base import Layer


def no_hook(*args: object, **kwargs: object) -> None:
    """Do nothing: a copied or unpickled hook becomes this function."""


def _unpickled() -> Callable[..., None]:
    return no_hook


def _is_transformed() -> bool:
    """Return whether torch.compile, torch.jit or a transform of torch.func runs the model now.

    Their tensors may not leave the pass, and have no graph that a hook could read.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
    )


class SafeHook:
    """A hook that copies and pickles as :func:`no_hook`: K-FAC stays with the original model."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the function, except in a pass that is transformed."""
        if not _is_transformed():
            self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _unpickled, ()


_stances: list[AbstractContextManager[Any]] = []
"""One per forward that runs: the first sets torch.compile's stance, the last resets it."""

_full_graphs: list[CodeType] = []
"""Functions with ``fullgraph=True`` that the compiler skips until :meth:`EagerForwards.enter`."""


def _needs_graph_break() -> bool:
    """Return whether the graph that the compiler traces now must break at the model.

    The compiler runs this function while it traces. A whole graph must not break, so an exception
    makes the compiler call the whole function as Python.
    """
    from torch._dynamo.exc import SkipFrame
    from torch._dynamo.symbolic_convert import InstructionTranslator

    root = InstructionTranslator.current_tx().output.root_tx
    if root.one_graph and not root.export and hasattr(eval_frame, "set_code_exec_strategy"):
        _full_graphs.append(root.f_code)
        raise SkipFrame("K-FAC collects statistics")
    return not root.export


class EagerForwards:
    """Hooks that run the modules with statistics eagerly while ``enabled``, and nothing else.

    The compiler calls a model as Python, and then the hooks switch the compiler off until the
    forward ends. A function that calls the model is traced: its graph breaks at the model, which is
    then called as Python. ``enabled`` guards the graphs, so each is compiled once.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.running: list[tuple[int, nn.Module, Any]] = []
        """Thread, module and the compiler's callback of each outermost forward."""

    def hooks(self, model: nn.Module, layers: Sequence[Layer]) -> Iterator[RemovableHandle]:
        """Put hooks on all modules that contain a layer; yield their handles."""
        from torch._dynamo.decorators import skip_code  # type: ignore[attr-defined]

        torch.compiler.assume_constant_result(_needs_graph_break)  # type: ignore[no-untyped-call]
        if torch._dynamo.config.skip_nnmodule_hook_guards:
            # A graph would also serve models that got hooks later, or other models without hooks.
            torch._dynamo.config.skip_nnmodule_hook_guards = False
            torch.compiler.reset()
        for function in (_Enter.__call__, _Leave.__call__, _is_transformed):
            skip_code(function.__code__)  # else the compiler, called here, would trace it alone
        modules = {module for layer in layers for module in layer.modules}
        for module in model.modules():
            if not modules.isdisjoint(module.modules()):
                yield module.register_forward_pre_hook(_Enter(self), prepend=True)
                yield module.register_forward_hook(_Leave(self), always_call=True)

    def enter(self, module: nn.Module, callback: Any) -> None:
        """Begin a forward. The compiler is off; ``callback`` is None if it was off before."""
        thread = get_ident()
        self.leave(module)  # Ctrl-C in a forward calls no hook, so that forward may still be here
        if callback is None and any(entry[0] == thread for entry in self.running):
            return
        if callback is not None:
            while _full_graphs:
                default = eval_frame._FrameAction.DEFAULT
                strategy = eval_frame._FrameExecStrategy(default, default)
                eval_frame.set_code_exec_strategy(_full_graphs.pop(), strategy)
            if hasattr(eval_frame, "set_fullgraph_compiled_frame_count"):
                # Newer versions refuse fullgraph=True where nothing is compiled; -1 allows it.
                eval_frame.set_fullgraph_compiled_frame_count(-1)
        self.running.append((thread, module, callback))
        # Parts of the model may be compiled alone. The stance reaches them inside this forward.
        _stances.append(nullcontext() if _stances else torch.compiler.set_stance("force_eager"))

    def leave(self, module: nn.Module) -> Any:
        """End the forward that ``module`` began, if it began one; return its callback."""
        for i, (thread, entered, _) in enumerate(self.running):
            if entered is module and thread == get_ident():
                return self._end(i)
        return None

    def disable(self) -> None:
        """End the collection of statistics, and the forwards that Ctrl-C left."""
        self.enabled = False
        while self.running:
            self._end(0)

    def _end(self, i: int) -> Any:
        # The first stance set the compiler's, so it must go last.
        _stances.pop(-1 if len(_stances) > 1 else 0).__exit__(None, None, None)
        return self.running.pop(i)[-1]


class _Enter(SafeHook):
    def __init__(self, forwards: EagerForwards) -> None:
        self.forwards = forwards

    def __call__(self, module: nn.Module, inputs: object) -> None:
        if not self.forwards.enabled:
            return
        if torch.compiler.is_dynamo_compiling():
            if _needs_graph_break():
                torch._dynamo.graph_break()
        elif not _is_transformed():
            self.forwards.enter(module, eval_frame.set_eval_frame(None))


class _Leave(_Enter):
    def __call__(self, module: nn.Module, inputs: object, output: object = None) -> None:
        if self.forwards.running and not _is_transformed():
            callback = self.forwards.leave(module)
            if callback is not None:
                eval_frame.set_eval_frame(callback)


class _Current(local):
    """The context that the forward of a module runs in now, in each thread."""

    context: AbstractContextManager[Any] | None = None


class ForwardContext:
    """Hooks that run the forward of a module inside a context.

    The context ends when the earlier forward hooks of the module have run. Ctrl-C in a forward
    calls no hook, so the context then stays until :meth:`leave`.

    Args:
        module: The module.
        make: Returns the context for a forward that begins, or None.
    """

    def __init__(
        self, module: nn.Module, make: Callable[[nn.Module], AbstractContextManager[Any] | None]
    ) -> None:
        self._make, self._current = make, _Current()
        after = SafeHook(lambda module, inputs, output: self.leave())
        self._handles = [
            module.register_forward_pre_hook(SafeHook(self._enter)),
            module.register_forward_hook(after, always_call=True),
        ]

    def _enter(self, module: nn.Module, inputs: object) -> None:
        self.leave()
        context = self._make(module)
        if context is not None:
            context.__enter__()
            self._current.context = context

    def leave(self) -> None:
        """Leave the context of this thread, if there is one."""
        context, self._current.context = self._current.context, None
        if context is not None:
            context.__exit__(None, None, None)

    def remove(self) -> None:
        """Remove the hooks and leave the context."""
        for handle in self._handles:
            handle.remove()
        self.leave()


def forward_contexts(
    layers: Iterable[Layer], is_enabled: Callable[[], bool]
) -> Iterator[ForwardContext]:
    """Put the hooks on modules that their layers need; yield these hooks.

    Args:
        layers: The layers. Those of one module have the same needs.
        is_enabled: Returns whether statistics are collected. Passes without them, in eval mode or
            without gradients, run outside a context.
    """

    def make(layer: Layer, module: nn.Module) -> AbstractContextManager[Any] | None:
        # Not left out inside pause(): checkpointing must repeat the same operations there.
        if not (is_enabled() and module.training and torch.is_grad_enabled()):
            return None
        return layer.forward_context or _hidden_hooks()

    for module, layer in {m: x for x in layers for m in x.modules}.items():
        if layer.forward_context is not None or layer.reads_saved_tensors:
            yield ForwardContext(module, partial(make, layer))


def _hidden_hooks() -> AbstractContextManager[Any] | None:
    """Return a context that lets layers read what autograd saves, None if they can read it.

    Checkpointing would allow one read only. A hook that returns the tensor itself hides the hooks
    of checkpointing from the module.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    is_hooked = top is None or top(True) is not None  # torch 2.6 cannot tell
    return saved_tensors_hooks(_same, _same) if is_hooked else None


def _same(saved: Tensor) -> Tensor:
    return saved.detach()  # an output that is saved as it is would keep itself alive
