"""Collects raw moments of A and G while a model trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kfac_bench.core.layers import Layer


@dataclass(slots=True)
class Collected:
    """Sums over the calls and micro-batches since the last :meth:`Capture.pop`."""

    a: Tensor
    g: Tensor
    samples: int
    rows: int
    forward: int  # the forward pass that `samples` last counted


class Capture:
    """Hooks on the layers that sum moments while ``enabled``.

    Both moments are computed when the gradient of the output arrives, so a forward without a
    backward counts nothing and one recomputed by activation checkpointing counts once. The input
    that is held until then is the one autograd holds for the weight gradient. The gradient is
    read by a hook on the output tensor: a module backward hook breaks before in-place activations.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        self.enabled = True
        self.seconds = 0.0  # host time in the hooks since it was last set to 0
        self._collected: dict[str, Collected] = {}
        self._forward = 0
        self._handles = [model.register_forward_pre_hook(self._count_forward)]
        self._handles += [
            layer.module.register_forward_hook(self._hook(layer), with_kwargs=True)
            for layer in layers
        ]

    def _count_forward(self, module: nn.Module, inputs: object) -> None:
        self._forward += 1

    def _hook(self, layer: Layer) -> Callable[..., None]:
        def on_forward(
            module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
        ) -> None:
            if module is not layer.module:  # a deep copy of the model carries our hook: not ours
                return
            if not (self.enabled and module.training and output.requires_grad):
                return
            x = args[0] if args else kwargs["input"]
            add = partial(self._add, layer, x.detach(), self._forward)
            output.register_hook(add)  # type: ignore[no-untyped-call]

        return on_forward

    def _add(self, layer: Layer, x: Tensor, forward: int, g: Tensor) -> None:
        start = time.perf_counter()
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            new = layer.moments(x, g)
        old = self._collected.get(layer.name)
        if old is None:
            self._collected[layer.name] = Collected(new.a, new.g, new.samples, new.rows, forward)
        else:
            old.a += new.a
            old.g += new.g
            old.rows += new.rows
            if old.forward != forward:  # further calls in one forward are further positions
                old.samples += new.samples
                old.forward = forward
        self.seconds += time.perf_counter() - start

    def pop(self) -> dict[str, Collected]:
        """What was collected since the last call, by layer; layers not used are missing."""
        collected, self._collected = self._collected, {}
        return collected

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
