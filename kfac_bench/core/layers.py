"""How a module is seen as one linear map y = W a: the only place that knows modules."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_bench.core.factors import (
    at_least_float32,
    autocorrelation_moment_3x3,
    gram,
    patch_moment,
    with_bias,
)
from kfac_bench.core.plan import LayerSpec


@dataclass(frozen=True, slots=True)
class Moments:
    """Raw moments of one call: sum a a^T, sum g g^T; samples N; rows = N times positions."""

    a: Tensor
    g: Tensor
    samples: int
    rows: int


class Layer(ABC):
    """A covered module: its spec, its statistics, its gradient as one matrix."""

    is_conv = False

    def __init__(self, name: str, module: nn.Linear | nn.Conv2d) -> None:
        self.name, self.module = name, module
        self.weight, self.bias = module.weight, module.bias
        self.spec = LayerSpec(
            name, self.weight[0].numel() + (self.bias is not None), self.weight.shape[0]
        )

    @abstractmethod
    def moments(self, x: Tensor, g: Tensor) -> Moments:
        """From the input ``x`` and the gradient ``g`` of the output, as the module saw them."""

    def get_grad(self) -> Tensor | None:
        """Weight and bias gradient as [g_dim, a_dim], at least float32.

        None if backward did not reach it.
        """
        if self.weight.grad is None:
            return None
        grad = at_least_float32(self.weight.grad.flatten(1))
        if self.bias is None:
            return grad
        bias = self.bias.grad
        column = grad.new_zeros(len(grad)) if bias is None else bias.to(grad.dtype)
        return torch.cat([grad, column.unsqueeze(1)], dim=1)

    def set_grad(self, grad: Tensor) -> None:
        """Write [g_dim, a_dim] back into the parameters' gradients, in place."""
        assert self.weight.grad is not None
        if self.bias is not None:
            if self.bias.grad is not None:
                self.bias.grad.copy_(grad[:, -1])
            grad = grad[:, :-1]
        self.weight.grad.copy_(grad.view_as(self.weight.grad))


class LinearLayer(Layer):
    """nn.Linear on [N, ..., d]: the dimensions between are shared positions."""

    def moments(self, x: Tensor, g: Tensor) -> Moments:
        """See :meth:`Layer.moments`."""
        samples = x.shape[0] if x.ndim > 1 else 1
        rows = x.reshape(-1, x.shape[-1])
        a = gram(rows)
        if self.bias is not None:
            a = with_bias(a, rows.sum(0, dtype=a.dtype), len(rows))
        return Moments(a, gram(g.reshape(-1, g.shape[-1])), samples, len(rows))


class Conv2dLayer(Layer):
    """nn.Conv2d with groups=1, on [N, C, H, W]: output positions are shared positions."""

    is_conv = True
    module: nn.Conv2d

    def moments(self, x: Tensor, g: Tensor) -> Moments:
        """See :meth:`Layer.moments`."""
        if x.ndim == 3:
            x, g = x.unsqueeze(0), g.unsqueeze(0)
        positions = g.shape[2] * g.shape[3]
        rows = len(g) * positions
        a = self._input_moment(x)
        return Moments(a, gram(g.permute(0, 2, 3, 1).reshape(rows, -1)), len(g), rows)

    def _input_moment(self, x: Tensor) -> Tensor:
        conv = self.module
        kernel = (conv.kernel_size[0], conv.kernel_size[1])
        stride = (conv.stride[0], conv.stride[1])
        dilation = (conv.dilation[0], conv.dilation[1])
        pad = list(conv._reversed_padding_repeated_twice)  # of F.pad: also for padding="same"
        if (
            x.device.type == "cpu"  # not yet measured on a GPU
            and (kernel, stride, dilation, pad) == ((3, 3), (1, 1), (1, 1), [1, 1, 1, 1])
            and conv.padding_mode == "zeros"
            and min(x.shape[2:]) >= 2
        ):
            return autocorrelation_moment_3x3(x, bias=self.bias is not None)
        if any(pad):
            mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
            x = F.pad(x, pad, mode=mode)
        return patch_moment(x, kernel, stride, dilation, bias=self.bias is not None)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A module with parameters of its own that the preconditioner leaves to the optimizer."""

    name: str
    kind: str
    params: int
    reason: str


def find_layers(model: nn.Module, skip: Sequence[str] = ()) -> tuple[list[Layer], list[Skipped]]:
    """Covered layers, and all other modules that own parameters, with the reason.

    ``skip`` holds regular expressions, searched in the name and in the class name.
    """
    layers: list[Layer] = []
    skipped: list[Skipped] = []
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        reason = _reason_to_skip(name, module, skip)
        if reason is None:
            assert isinstance(module, nn.Linear | nn.Conv2d)
            layers.append(
                LinearLayer(name, module)
                if isinstance(module, nn.Linear)
                else Conv2dLayer(name, module)
            )
        else:
            params = sum(p.numel() for p in own)
            skipped.append(Skipped(name, type(module).__name__, params, reason))
    return layers, skipped


def _reason_to_skip(name: str, module: nn.Module, skip: Sequence[str]) -> str | None:
    kind = type(module).__name__
    for pattern in skip:
        if re.search(pattern, name) or re.search(pattern, kind):
            return f"skip pattern {pattern!r}"
    if not isinstance(module, nn.Linear | nn.Conv2d):
        return f"no Kronecker factors for {kind}"
    if isinstance(module, nn.Conv2d) and module.groups != 1:
        return f"grouped convolution (groups={module.groups})"
    if not module.weight.requires_grad:
        return "weight is frozen"
    return None


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile, whose names are clean."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
