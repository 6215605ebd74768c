"""Hooks that run the forward of a module inside a context, at steps that collect statistics."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from kfac_bench.core.capture.safe_hook import SafeHook
from kfac_bench.core.layers.base import Layer


def context_hooks(layers: Iterable[Layer], is_enabled: Callable[[], bool]) -> list[RemovableHandle]:
    """Put hooks on modules so that each runs inside the ``forward_context`` of its layers.

    The context ends when the earlier forward hooks of the module have run.

    Args:
        layers: The layers. Those of one module share one context.
        is_enabled: Returns whether statistics are collected. Passes without them, in eval mode or
            without gradients, run outside the context.
    """
    contexts = {m: x.forward_context for x in layers for m in x.modules}
    return [
        handle
        for module, context in contexts.items()
        if context is not None
        for handle in _ContextHooks(context, is_enabled).put_on(module)
    ]


class _ContextHooks:
    def __init__(
        self, context: AbstractContextManager[Any], is_enabled: Callable[[], bool]
    ) -> None:
        self._context, self._is_enabled = context, is_enabled
        self._is_inside = False

    def put_on(self, module: nn.Module) -> list[RemovableHandle]:
        leave = SafeHook(self._leave)
        return [
            module.register_forward_pre_hook(SafeHook(self._enter)),
            module.register_forward_hook(leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, inputs: object) -> None:
        # Not left out inside pause(): checkpointing must repeat the same operations there.
        if self._is_enabled() and module.training and torch.is_grad_enabled():
            # Ctrl-C in a forward calls no hook, so the context of that forward may still be there.
            if not self._is_inside:
                self._context.__enter__()
            self._is_inside = True

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        if self._is_inside:
            self._is_inside = False
            self._context.__exit__(None, None, None)
