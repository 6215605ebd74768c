"""Convolutions and transposed convolutions in one, two and three dimensions, grouped or not."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_bench.core.kernels.gram import FEW_CHANNELS, at_least_float32, channel_gram, join_flat
from kfac_bench.core.kernels.patches import (
    input_moment,
    output_size,
    pad_input,
    patch_rows,
    patch_sum,
)
from kfac_bench.core.kernels.transposed_patches import (
    Geometry,
    transposed_moment,
    transposed_rows,
    transposed_sum,
)
from kfac_bench.core.layers.base import Layer, with_ones
from kfac_bench.core.planning.layer_spec import LayerSpec

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class ConvLayer(Layer):
    """nn.Conv1d, Conv2d and Conv3d on [N, C, *spatial]. Output positions are shared positions.

    A row of a is the patch of the input that one output position sees, with channels first.
    """

    is_conv = True

    @property
    def taps(self) -> int:
        """See :attr:`Layer.taps`: the kernel offsets."""
        return math.prod(self.weight.shape[2:])

    def is_same_map(self, other: Layer) -> bool:
        """See :meth:`Layer.is_same_map`. Atrous convolutions may share a weight only."""
        return super().is_same_map(other) and all(
            getattr(self.modules[0], name) == getattr(other.modules[0], name)
            for name in ("stride", "padding", "dilation", "groups", "padding_mode")
        )

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

    def _of_axes(self, name: str) -> tuple[int, ...]:
        """Return an option of the module for each axis. A script may have set it to one number."""
        value = getattr(self.modules[0], name)
        return (value,) * (self.weight.ndim - 2) if isinstance(value, int) else tuple(value)

    @property
    def _stride(self) -> tuple[int, ...]:
        return self._of_axes("stride")

    @property
    def _dilation(self) -> tuple[int, ...]:
        return self._of_axes("dilation")

    @property
    def _pads(self) -> list[int]:
        """The padding of the forward, in the order of :func:`torch.nn.functional.pad`."""
        conv = self._conv
        if conv.padding_mode == "zeros" and not isinstance(conv.padding, str):
            # Scripts change conv.padding later. Only the other modes read the attribute below.
            return [pad for pad in reversed(self._of_axes("padding")) for _ in range(2)]
        return conv._reversed_padding_repeated_twice

    def fits(self, x: Tensor, output: Tensor) -> bool:
        """See :meth:`Layer.fits`. A forward may pad its input itself, as timm's Conv2dSame does."""
        conv, n = self._conv, self.weight.ndim - 1
        pads, size = self._pads, list(x.shape[1 - n :])
        size = output_size(size, conv.kernel_size, self._stride, pads, self._dilation)
        return self._has_channels(x, output) and list(output.shape[1 - n :]) == size

    def computed_input(self, x: Tensor, output: Tensor) -> Tensor:
        """See :meth:`Layer.computed_input`. Some paddings make a copy that torch keeps instead."""
        x, pads = super().computed_input(x, output), self._pads
        # An even kernel with padding="same" needs more zeros at the end than at the beginning.
        is_copied = self._conv.padding_mode == "circular" or pads[::2] != pads[1::2]
        return x.clone() if is_copied else x

    def _has_channels(self, x: Tensor, output: Tensor) -> bool:
        n = self.weight.ndim - 1
        channels = [*x.shape[-n : 1 - n], *output.shape[-n : 1 - n]]
        return channels == [self._conv.in_channels, self._conv.out_channels]

    def is_single(self, x: Tensor) -> bool:
        """See :meth:`Layer.is_single`."""
        return x.ndim < self.weight.ndim

    def rows(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.rows`. The patches are made explicitly."""
        conv, (x, g) = self._conv, self._batched(x, g)
        a = patch_rows(self._pad(x), conv.kernel_size, self._stride, self._dilation, conv.groups)
        a = a.transpose(0, 1)
        return with_ones(a) if self.bias is not None else a, self._output_rows(g)

    def size(self, x: Tensor, g: Tensor) -> tuple[int, int]:
        """See :meth:`Layer.size`."""
        _, g = self._batched(x, g)
        return len(g), g[0, 0].numel()

    def moment_a(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_a`. Fast ways need no explicit patches."""
        if self.spec.a_diagonal:
            return super().moment_a(x, g)
        has_bias, (x, _) = self.bias is not None, self._batched(x, g)
        channels = self._channels_of_blocks()
        if not channels:
            return self._input_moment(x, has_bias=has_bias)
        # A block needs only its own channels, and the last block the bias.
        last = len(channels) - 1
        return join_flat(
            [
                self._input_moment(part, has_bias=has_bias and i == last)
                for i, part in enumerate(torch.split(x, channels, 1))
            ]
        )

    def _channels_of_blocks(self) -> list[int]:
        """Return the number of input channels of each block of A; [] if A has no such blocks."""
        blocks = list(self.spec.a_blocks)
        if not blocks or self.spec.groups > 1:
            return []
        blocks[-1] -= self.bias is not None
        # With blocks of one or two rows, the last one may have no channel but only the bias.
        has_channels = all(n and n % self.taps == 0 for n in blocks)
        return [n // self.taps for n in blocks] if has_channels else []

    def _input_moment(self, x: Tensor, *, has_bias: bool) -> Tensor:
        conv = self._conv
        return input_moment(
            x,
            conv.kernel_size,
            self._stride,
            self._pads,
            conv.padding_mode,
            self._dilation,
            conv.groups,
            bias=has_bias,
        )

    def moment_g(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_g`."""
        _, g = self._batched(x, g)
        # One small product per image saves moving the channels of g into rows.
        if g.is_contiguous() and self.spec.g_dim <= FEW_CHANNELS and not self.spec.g_diagonal:
            return channel_gram(g.view(len(g), self.spec.groups, self.spec.g_dim, -1))
        return self.moment_of_g(self._output_rows(g).flatten(1, 2))

    def sums(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.sums`."""
        conv, (x, g) = self._conv, self._batched(x, g)
        # A sum over positions needs no explicit patches.
        a = patch_sum(self._pad(x), conv.kernel_size, self._stride, self._dilation, conv.groups)
        g_rows = at_least_float32(self._output_rows(g))
        return self._with_bias_sum(a.transpose(0, 1), g_rows.shape[2]), g_rows.sum(2)

    def gradient(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.gradient`. It needs no explicit patches."""
        x, g = (at_least_float32(t) for t in self._batched(x, g))
        x = self._pad(x)
        return self._joined_gradient(x, g, self._weight_gradient(x, g))

    def _weight_gradient(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Return the gradient of the weight of a convolution of padded ``inputs``."""
        conv, no_padding = self._conv, [0] * (inputs.ndim - 2)
        like = inputs.new_empty(self.weight.shape)
        options = self._stride, no_padding, self._dilation, False, no_padding, conv.groups
        backward = torch.ops.aten.convolution_backward
        made: Tensor = backward(outputs, inputs, like, None, *options, [False, True, False])[1]
        return made

    def _joined_gradient(self, x: Tensor, g: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        bias = None if self.bias is None else g.transpose(0, 1).flatten(1).sum(1)
        return self.to_matrix(weight, bias), x.norm() * g.norm() * self.taps**0.5

    def _batched(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Turn a single image [C, *spatial] into a batch of one."""
        return (x.unsqueeze(0), g.unsqueeze(0)) if self.is_single(x) else (x, g)

    def _pad(self, x: Tensor) -> Tensor:
        return pad_input(x, self._pads, self._conv.padding_mode)

    def _output_rows(self, g: Tensor) -> Tensor:
        """Reshape [N, groups g_dim, *spatial] to [groups, N, s, g_dim]."""
        n, groups = len(g), self.spec.groups
        return g.reshape(n, groups, self.spec.g_dim, -1).permute(1, 0, 3, 2)


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
        return Geometry(
            module.kernel_size,
            self._stride,
            self._of_axes("padding"),
            self._dilation,
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
        padding = self._of_axes("padding")
        before: list[int] = []  # F.pad wants the last dimension first
        after: list[int] = []  # perhaps negative: no pixel reaches these positions
        for i, size in enumerate(x.shape[2:]):
            span = self._dilation[i] * (module.kernel_size[i] - 1) + 1
            reached = (size - 1) * self._stride[i] + span
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
