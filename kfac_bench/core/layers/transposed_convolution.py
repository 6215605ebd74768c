"""Transposed convolutions in one, two and three dimensions, grouped or not."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from kfac_bench.core.kernels.gram import at_least_float32
from kfac_bench.core.kernels.transposed_patches import (
    Geometry,
    transposed_moment,
    transposed_rows,
    transposed_sum,
)
from kfac_bench.core.layers.base import Layer, with_ones
from kfac_bench.core.layers.convolution import ConvLayer
from kfac_bench.core.planning.layer_spec import LayerSpec

TransposedConv = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


class TransposedConvLayer(ConvLayer):
    """nn.ConvTranspose1d, 2d and 3d on [N, C, *spatial]. Output positions are shared positions.

    A row of a is what one output position sees: channels of a group times kernel taps, zero where
    no pixel meets a tap. The weight is [C_in, C_out / groups, *kernel].
    """

    def make_spec(self, max_dim: int) -> LayerSpec:
        """See :meth:`Layer.make_spec`."""
        channels, g_dim, *kernel = self.weight.shape
        groups = self._transposed.groups
        a_dim = channels // groups * math.prod(kernel) + (self.bias is not None)
        return LayerSpec(
            self.name,
            a_dim,
            g_dim,
            groups,
            a_diagonal=a_dim > max_dim,
            g_diagonal=g_dim > max_dim,
        )

    @property
    def _transposed(self) -> TransposedConv:
        return self.modules[0]  # type: ignore[return-value]

    def _geometry(self, g: Tensor) -> Geometry:
        """Return the shape of one call; the output tells its output padding."""
        module = self._transposed
        assert not isinstance(module.padding, str)
        return Geometry(
            module.kernel_size,
            module.stride,
            module.padding,
            module.dilation,
            module.groups,
            g.shape[2:],
        )

    def fits(self, x: Tensor, output: Tensor) -> bool:
        """See :meth:`Layer.fits`. The output tells its size."""
        return self._has_channels(x, output)

    def rows(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.rows`. The patches are made explicitly."""
        x, g = self._batched(x, g)
        a = transposed_rows(x, self._geometry(g)).transpose(0, 1)
        return with_ones(a) if self.bias is not None else a, self._output_rows(g)

    def moment_a(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_a`. It needs no explicit patches and no inserted zeros."""
        if self.spec.a_diagonal:
            return Layer.moment_a(self, x, g)
        x, g = self._batched(x, g)
        return transposed_moment(x, self._geometry(g), bias=self.bias is not None)

    def sums(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.sums`."""
        x, g = self._batched(x, g)
        a = transposed_sum(x, self._geometry(g)).transpose(0, 1)
        g_rows = at_least_float32(self._output_rows(g))
        return self._with_bias_sum(a, g_rows.shape[2]), g_rows.sum(2)

    def gradient(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.gradient`. It is that of the convolution from outputs to inputs."""
        x, g = (at_least_float32(t) for t in self._batched(x, g))
        module = self._transposed
        padding = module.padding
        assert not isinstance(padding, str)
        before: list[int] = []  # F.pad wants the last dimension first
        after: list[int] = []  # perhaps negative: no pixel reaches these positions
        for i, size in enumerate(x.shape[2:]):
            span = module.dilation[i] * (module.kernel_size[i] - 1) + 1
            reached = (size - 1) * module.stride[i] + span
            before = [padding[i], 0, *before]
            after = [0, reached - padding[i] - g.shape[i + 2], *after]
        padded = F.pad(F.pad(g, before), after)
        return self._joined_gradient(x, g, self._weight_gradient(padded, x))

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :meth:`Layer.to_matrix`."""
        return super().to_matrix(self._swap(weight, len(weight) // self.spec.groups), bias)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Layer.from_matrix`."""
        groups, g_dim, _ = self.spec.grad_shape
        columns = matrix if self.bias is None else matrix[..., :-1]
        weight = columns.reshape(groups * g_dim, -1, *self.weight.shape[2:])
        bias = None if self.bias is None else matrix[..., -1].reshape(-1)
        return self._swap(weight, g_dim), bias

    def _swap(self, weight: Tensor, rows: int) -> Tensor:
        """Turn [groups rows, columns, *kernel] into [groups columns, rows, *kernel]."""
        by_group = weight.reshape(self.spec.groups, rows, *weight.shape[1:])
        return by_group.transpose(1, 2).flatten(0, 1)
