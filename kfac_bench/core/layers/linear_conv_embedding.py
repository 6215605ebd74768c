"""Linear, convolution and embedding layers: the only place that knows how they map a to y."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kfac_bench.core.kernels.factors import (
    FEW_CHANNELS,
    at_least_float32,
    channel_gram,
    gram,
    input_moment,
    pad_input,
    patch_rows,
    patch_sum,
)
from kfac_bench.core.layers.base import Layer, moment, with_ones
from kfac_bench.core.planning.layer_spec import LayerSpec

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class LinearLayer(Layer):
    """nn.Linear on [N, ..., d]: the dimensions between are shared positions."""

    def rows(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.rows`."""
        x, g = self._by_sample(x), self._by_sample(g)
        return with_ones(x) if self.bias is not None else x, g

    def size(self, x: Tensor, g: Tensor) -> tuple[int, int]:
        """See :meth:`Layer.size`."""
        samples = len(g) if g.ndim > 1 else 1
        return samples, g.numel() // (samples * g.shape[-1])

    def moment_a(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_a`: the bias is a sum, not a column."""
        if self.spec.a_diagonal:
            return super().moment_a(x, g)
        return gram(x.reshape(1, -1, x.shape[-1]), bias=self.bias is not None)

    def moment_g(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_g`."""
        return moment(g.reshape(1, -1, g.shape[-1]), diagonal=self.spec.g_diagonal)

    def sums(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.sums`."""
        x, g = (at_least_float32(self._by_sample(t)) for t in (x, g))
        return self._with_bias_sum(x.sum(2), x.shape[2]), g.sum(2)

    @staticmethod
    def _by_sample(x: Tensor) -> Tensor:
        """[d] or [N, ..., d] as [1, N, s, d]."""
        return x.reshape(1, len(x) if x.ndim > 1 else 1, -1, x.shape[-1])


class Conv1DLayer(LinearLayer):
    """Conv1D of transformers: a Linear layer whose weight is stored as [inputs, outputs]."""

    def make_spec(self, max_dim: int) -> LayerSpec:
        """See :meth:`Layer.make_spec`."""
        a_dim, g_dim = len(self.weight) + (self.bias is not None), self.weight.shape[1]
        return LayerSpec(
            self.name, a_dim, g_dim, a_diagonal=a_dim > max_dim, g_diagonal=g_dim > max_dim
        )

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :meth:`Layer.to_matrix`."""
        matrix = at_least_float32(weight.mT.unsqueeze(0))
        if bias is None:
            return matrix
        return torch.cat([matrix, bias.to(matrix.dtype).view(1, -1, 1)], dim=-1)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Layer.from_matrix`."""
        bias = None if self.bias is None else matrix[0, :, -1]
        return matrix[0, :, : len(self.weight)].mT, bias


class ConvLayer(Layer):
    """nn.Conv1d, 2d, 3d on [N, C, *spatial]: output positions are shared positions."""

    is_conv = True

    def make_spec(self, max_dim: int) -> LayerSpec:
        """See :meth:`Layer.make_spec`."""
        conv = self._conv
        a_dim = math.prod(self.weight.shape[1:]) + (self.bias is not None)
        g_dim = conv.out_channels // conv.groups
        return LayerSpec(
            self.name,
            a_dim,
            g_dim,
            conv.groups,
            a_diagonal=a_dim > max_dim,
            g_diagonal=g_dim > max_dim,
        )

    @property
    def _conv(self) -> Conv:
        return self.modules[0]  # type: ignore[return-value]

    def rows(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.rows`: the patches, explicitly."""
        conv, (x, g) = self._conv, self._batched(x, g)
        a = patch_rows(self._pad(x), conv.kernel_size, conv.stride, conv.dilation, conv.groups)
        a = a.transpose(0, 1)
        return with_ones(a) if self.bias is not None else a, self._output_rows(g)

    def size(self, x: Tensor, g: Tensor) -> tuple[int, int]:
        """See :meth:`Layer.size`."""
        _, g = self._batched(x, g)
        return len(g), g[0, 0].numel()

    def moment_a(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_a`: no patches where they can be done without."""
        if self.spec.a_diagonal:
            return super().moment_a(x, g)
        conv, (x, _) = self._conv, self._batched(x, g)
        return input_moment(
            x,
            conv.kernel_size,
            conv.stride,
            conv._reversed_padding_repeated_twice,  # right for padding="same", too
            conv.padding_mode,
            conv.dilation,
            conv.groups,
            bias=self.bias is not None,
        )

    def moment_g(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_g`."""
        _, g = self._batched(x, g)
        if g.is_contiguous() and self.spec.g_dim <= FEW_CHANNELS and not self.spec.g_diagonal:
            return channel_gram(g.view(len(g), self.spec.groups, self.spec.g_dim, -1))
        return moment(self._output_rows(g).flatten(1, 2), diagonal=self.spec.g_diagonal)

    def sums(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.sums`."""
        conv, (x, g) = self._conv, self._batched(x, g)
        a = patch_sum(self._pad(x), conv.kernel_size, conv.stride, conv.dilation, conv.groups)
        g_rows = at_least_float32(self._output_rows(g))
        return self._with_bias_sum(a.transpose(0, 1), g_rows.shape[2]), g_rows.sum(2)

    def _batched(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """A single image [C, *spatial] becomes a batch of one."""
        return (x, g) if x.ndim == self.weight.ndim else (x.unsqueeze(0), g.unsqueeze(0))

    def _pad(self, x: Tensor) -> Tensor:
        return pad_input(x, self._conv._reversed_padding_repeated_twice, self._conv.padding_mode)

    def _output_rows(self, g: Tensor) -> Tensor:
        """[N, groups g_dim, *spatial] as [groups, N, s, g_dim]."""
        n, groups = len(g), self.spec.groups
        return g.reshape(n, groups, self.spec.g_dim, -1).permute(1, 0, 3, 2)


class EmbeddingLayer(Layer):
    """nn.Embedding on tokens [N, ...]: a is a one-hot row, so A is the diagonal of frequencies."""

    @classmethod
    def reason_to_skip(cls, module: nn.Module) -> str | None:
        """See :meth:`Layer.reason_to_skip`."""
        assert isinstance(module, nn.Embedding)
        if module.sparse:
            return "sparse gradients"
        return "scale_grad_by_freq" if module.scale_grad_by_freq else None

    def make_spec(self, max_dim: int) -> LayerSpec:
        """See :meth:`Layer.make_spec`."""
        tokens, d = self.weight.shape
        return LayerSpec(self.name, tokens, d, a_diagonal=True, g_diagonal=d > max_dim)

    def rows(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.rows`; a is never used like this: it would be [tokens] wide."""
        raise NotImplementedError

    def size(self, x: Tensor, g: Tensor) -> tuple[int, int]:
        """See :meth:`Layer.size`."""
        samples = len(x) if x.ndim else 1
        return samples, x.numel() // samples

    def moment_a(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_a`: how often each token came."""
        tokens = x.flatten()
        counts = at_least_float32(g.new_zeros(1, self.spec.a_dim))
        counts[0].index_add_(0, tokens, counts.new_ones(()).expand(len(tokens)))
        return counts

    def moment_g(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_g`."""
        return moment(self._output_rows(x, g).flatten(1, 2), diagonal=self.spec.g_diagonal)

    def sums(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.sums`: how often each sample has each token."""
        g = self._output_rows(x, g)
        tokens = x.reshape(g.shape[1], -1)
        counts = g.new_zeros(len(tokens), self.spec.a_dim)
        counts.scatter_add_(1, tokens, counts.new_ones(()).expand_as(tokens))
        return counts.unsqueeze(0), g.sum(2)

    def _output_rows(self, x: Tensor, g: Tensor) -> Tensor:
        """[1, N, s, d]; what padding saw does not reach the weight."""
        padding: int | None = self.modules[0].padding_idx  # type: ignore[assignment]
        g = at_least_float32(g)
        if padding is not None:
            g = g * (x != padding).unsqueeze(-1)
        return g.reshape(1, len(x) if x.ndim else 1, -1, self.spec.g_dim)

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :meth:`Layer.to_matrix`."""
        return at_least_float32(weight.mT.unsqueeze(0))

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Layer.from_matrix`."""
        return matrix[0].mT, None
