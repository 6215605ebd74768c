"""What K-FAC needs of a layer: to be seen as linear maps y = W a, with its rows of a and g.

Deriving from :class:`Layer` is how a layer type of your own is covered: give ``rows``, and the
gradient's matrix form if ``weight`` is not [outputs, inputs...]; pass the class to ``KFAC`` as
``layer_types={MyModule: MyLayer}``. Overriding the other methods is for speed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from kfac_bench.core.distributed.dtensor import full, local
from kfac_bench.core.kernels.gram import at_least_float32, gram
from kfac_bench.core.planning.layer_spec import LayerSpec


class Call(NamedTuple):
    """One use of a layer in a forward."""

    x: Tensor
    """Its input, detached."""
    edge: GradientEdge
    """Where the gradient of its output passes by."""
    prepare: Callable[[Tensor], Tensor] | None = None
    """From what passes by to the gradient of the output, where that differs."""


SECOND_MOMENT_NUMEL = 1 << 22
"""Elements of per-sample gradients held at once (16 MiB of fp32)."""


class Layer(ABC):
    """A covered module: its spec, its statistics, its gradient as one tensor of matrices."""

    is_conv = False
    reads_saved_tensors = False
    """Whether a :class:`Call` reads what autograd's graph saved."""
    part = slice(None)
    """Which rows of weight and bias are this layer's, where several share them."""

    def __init__(self, name: str, module: nn.Module, max_dim: int) -> None:
        self.name = name
        self.modules = [module]
        """Several if they share the weight: their calls are further shared positions."""
        self.weight: Tensor = module.weight  # type: ignore[assignment]
        bias = getattr(module, "bias", None)
        self.bias: Tensor | None = bias if bias is not None and bias.requires_grad else None
        self.spec = self.make_spec(max_dim)

    @classmethod
    def reason_to_skip(cls, module: nn.Module) -> str | None:
        """Why this module cannot be covered; None if it can."""
        return None

    def make_spec(self, max_dim: int) -> LayerSpec:
        """Shapes; a factor of more than ``max_dim`` rows is kept as a diagonal."""
        a_dim = math.prod(self.weight.shape[1:]) + (self.bias is not None)
        g_dim = len(self.weight)
        return LayerSpec(
            self.name, a_dim, g_dim, a_diagonal=a_dim > max_dim, g_diagonal=g_dim > max_dim
        )

    def calls(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Iterator[Call]:
        """What a forward of ``module`` used the layer for."""
        if isinstance(output, Tensor) and output.requires_grad:
            x = (args[0] if args else next(iter(kwargs.values()))).detach()
            yield Call(x, *_edge_of(output))

    @abstractmethod
    def rows(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Of samples N and shared positions s: a [groups, N, s, a_dim], g [groups, N, s, g_dim].

        From the input ``x`` and the gradient ``g`` of the output, as the module saw them; a ends
        in a one if there is a bias.
        """

    def size(self, x: Tensor, g: Tensor) -> tuple[int, int]:
        """Samples N and shared positions s of one call."""
        a_rows, _ = self.rows(x, g)
        return a_rows.shape[1], a_rows.shape[2]

    def moment_a(self, x: Tensor, g: Tensor) -> Tensor:
        """Sum of a a^T over samples and positions ("expand"), in the factor's shape."""
        return moment(self.rows(x, g)[0].flatten(1, 2), diagonal=self.spec.a_diagonal)

    def moment_g(self, x: Tensor, g: Tensor) -> Tensor:
        """Sum of g g^T over samples and positions, in the factor's shape."""
        return moment(self.rows(x, g)[1].flatten(1, 2), diagonal=self.spec.g_diagonal)

    def sums(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """For "reduce": sums over positions, a [groups, N, a_dim] and g [groups, N, g_dim]."""
        a_rows, g_rows = self.rows(x, g)
        dtype = at_least_float32(x).dtype
        return a_rows.sum(2, dtype=dtype), g_rows.sum(2, dtype=dtype)

    def _with_bias_sum(self, a: Tensor, positions: int) -> Tensor:
        """Append what a bias sums up to over the positions."""
        if self.bias is None:
            return a
        return torch.cat([a, a.new_full((*a.shape[:-1], 1), positions)], dim=-1)

    def second_moment(
        self, calls: Sequence[tuple[Tensor, Tensor]], qa: Tensor, qg: Tensor
    ) -> Tensor:
        """Sum over samples of squared gradients in the eigenbasis, [groups, g_dim, a_dim].

        Of each sample (Q_G^T (sum over positions g a^T) Q_A)^2: EKFAC, George et al. 2018.
        ``calls`` are the (x, g) of one forward: a sample's gradient is the sum over them.
        """
        rows = [self.rows(x, g) for x, g in calls]
        a_rows = at_least_float32(torch.cat([a for a, _ in rows], 2)) @ qa.unsqueeze(1)
        g_rows = at_least_float32(torch.cat([g for _, g in rows], 2)) @ qg.unsqueeze(1)
        if a_rows.shape[2] == 1:  # one position: the square of a product is that of its parts
            return g_rows.squeeze(2).square().mT @ a_rows.squeeze(2).square()
        out = qa.new_zeros(self.spec.grad_shape)
        step = max(1, SECOND_MOMENT_NUMEL // self.spec.grad_numel)
        for some_a, some_g in zip(
            torch.split(a_rows, step, 1), torch.split(g_rows, step, 1), strict=True
        ):
            out += (some_g.mT @ some_a).square_().sum(1)
        return out

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Of tensors in the shapes of weight and bias: [groups, g_dim, a_dim], at least float32.

        ``bias`` is None if the layer has none.
        """
        groups, g_dim, _ = self.spec.grad_shape
        matrix = at_least_float32(weight.flatten(1)).view(groups, g_dim, -1)
        if bias is None:
            return matrix
        column = bias.to(matrix.dtype).view(groups, g_dim, 1)
        return torch.cat([matrix, column], dim=-1)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """What :meth:`to_matrix` was given; views of ``matrix`` if it is contiguous."""
        shape = (-1, *self.weight.shape[1:])
        if self.bias is None:
            return matrix.reshape(shape), None
        return matrix[..., :-1].reshape(shape), matrix[..., -1].reshape(-1)

    def get_grad(self) -> Tensor | None:
        """Weight and bias gradient as [groups, g_dim, a_dim], at least float32.

        None if backward did not reach it. If ranks hold parts, all ranks must call it.
        """
        if self.weight.grad is None:
            return None
        weight = full(self.weight.grad)[self.part]
        if self.bias is None:
            return self.to_matrix(weight, None)
        if self.bias.grad is None:
            return self.to_matrix(weight, weight.new_zeros(self.bias.shape)[self.part])
        return self.to_matrix(weight, full(self.bias.grad)[self.part])

    def set_grad(self, grad: Tensor) -> None:
        """Write [groups, g_dim, a_dim] back into the parameters' gradients, in place."""
        weight, bias = self.from_matrix(grad)
        assert self.weight.grad is not None
        local(self.weight.grad)[self.part].copy_(weight)
        if self.bias is not None and self.bias.grad is not None:
            assert bias is not None
            local(self.bias.grad)[self.part].copy_(bias)


def _edge_of(output: Tensor) -> tuple[GradientEdge, Callable[[Tensor], Tensor] | None]:
    """Where the gradient of ``output`` passes by, also if it is modified in place later.

    That gives a view (what Linear returns for a 3-d input) a new history, which begins with the
    node of what it is a view of.
    """
    base, shape = output._base, output.shape
    if base is None or base.numel() != output.numel():
        return get_gradient_edge(output), None
    if not (base.requires_grad and base.is_contiguous() and output.is_contiguous()):
        return get_gradient_edge(output), None
    return get_gradient_edge(base), lambda g: g.reshape(shape)


def moment(rows: Tensor, *, diagonal: bool = False) -> Tensor:
    """rows^T rows of [groups, R, d], or its diagonal."""
    return at_least_float32(rows).square().sum(1) if diagonal else gram(rows)


def with_ones(a_rows: Tensor) -> Tensor:
    """A last column of ones, the input of a bias."""
    return torch.cat([a_rows, a_rows.new_ones(*a_rows.shape[:-1], 1)], dim=-1)
