"""The input patches of a convolution: their moment, their sum, themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor

from kfac_bench.core.kernels.autocorrelation import autocorrelation_moment_3x3
from kfac_bench.core.kernels.gram import at_least_float32, gram, sum_of_grams

PATCH_NUMEL = 1 << 20
"""Patches made at a time: 4 MiB in float32 are still in the cache when the product reads them."""

AUTOCORRELATION_NUMEL = 1 << 15
"""Numbers in an input from which on its many calls pay: :func:`autocorrelation_moment_3x3`."""


def pad_input(x: Tensor, padding: Sequence[int], mode: str) -> Tensor:
    """What a convolution pads its input to: ``padding`` as F.pad takes it, a ``padding_mode``."""
    if not any(padding):
        return x
    return F.pad(x, list(padding), mode="constant" if mode == "zeros" else mode)


def input_moment(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    padding_mode: str,
    dilation: Sequence[int],
    groups: int = 1,
    *,
    bias: bool = False,
) -> Tensor:
    """:func:`patch_moment` of a convolution's own input, not yet padded, by the fastest way."""
    same_3x3 = (*kernel, *stride, *dilation, *padding) == (3, 3, 1, 1, 1, 1, 1, 1, 1, 1)
    if same_3x3 and padding_mode == "zeros" and groups == 1 and _autocorrelation_pays(x):
        return autocorrelation_moment_3x3(at_least_float32(x), bias=bias)
    x = pad_input(x, padding, padding_mode)
    return patch_moment(x, kernel, stride, dilation, groups, bias=bias)


def _autocorrelation_pays(x: Tensor) -> bool:
    """On a GPU it is not measured."""
    return x.device.type == "cpu" and x.numel() >= AUTOCORRELATION_NUMEL


def patch_moment(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    *,
    bias: bool = False,
) -> Tensor:
    """Moment of a convolution's input patches; ``x`` [N, C, *spatial] is padded already.

    [groups, a, a]: columns (channel in the group, *kernel offset) as in ``weight.flatten(1)``, then
    the bias if there is one.
    """
    if math.prod(kernel) == 1 and x.stride(1) == 1:  # channels-last: pixels are the rows already
        pixels = x[:, :, *(slice(None, None, s) for s in stride)].movedim(1, -1)
        return gram(pixels.reshape(-1, groups, x.shape[1] // groups).transpose(0, 1), bias=bias)

    columns = x.shape[1] // groups * math.prod(kernel)

    def parts() -> Iterator[Tensor]:
        for slab in _slabs(x, kernel, stride, dilation):
            slab = at_least_float32(slab).contiguous()
            patches = _patches(slab, kernel, stride, dilation, groups)
            yield patches.reshape(groups, columns, -1).mT

    return sum_of_grams(parts(), bias)


def patch_rows(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
) -> Tensor:
    """The patches themselves, [N, groups, positions, a] with :func:`patch_moment`'s columns."""
    patches = _patches(x, kernel, stride, dilation, groups)
    patches = patches.movedim(2 + len(kernel), 0)  # [N, groups, channel, *kernel, *positions]
    columns = x.shape[1] // groups * math.prod(kernel)
    return patches.reshape(len(x), groups, columns, -1).mT


def patch_sum(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
) -> Tensor:
    """:func:`patch_rows` summed over positions, [N, groups, a], without making them.

    One spatial dimension after the other: a product with the 0/1 matrix of which pixel meets which
    kernel offset. The last dimension goes first: it needs no copy, and the others are small then.
    """
    n, c = x.shape[:2]
    x = at_least_float32(x)
    for i in reversed(range(len(kernel))):
        meets = x.new_zeros(x.shape[2 + i], kernel[i])
        count = _positions(x.shape[2 + i], kernel[i], stride[i], dilation[i])
        for offset in range(kernel[i]):
            start = offset * dilation[i]
            meets[start : start + (count - 1) * stride[i] + 1 : stride[i], offset] = 1
        x = (x.movedim(2 + i, -1) @ meets).movedim(-1, 2 + i)
    return x.reshape(n, groups, c // groups * math.prod(kernel))


def _positions(size: int, kernel: int, stride: int, dilation: int) -> int:
    return (size - dilation * (kernel - 1) - 1) // stride + 1


def _patches(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """View [groups, channels of a group, *kernel, N, *positions] of x [N, C, *spatial]."""
    n, c, *sizes = x.shape
    sample, channel, *steps = x.stride()
    positions = map(_positions, sizes, kernel, stride, dilation)
    return x.as_strided(
        (groups, c // groups, *kernel, n, *positions),
        (
            c // groups * channel,
            channel,
            *(step * d for step, d in zip(steps, dilation, strict=True)),
            sample,
            *(step * s for step, s in zip(steps, stride, strict=True)),
        ),
    )


def _slabs(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Iterator[Tensor]:
    """Parts of x: together they have x's patches, each has about PATCH_NUMEL numbers of them.

    Whole samples; of one that is too large, the output rows (first spatial dimension).
    """
    positions = list(map(_positions, x.shape[2:], kernel, stride, dilation))
    row = x.shape[1] * math.prod(kernel) * math.prod(positions[1:])
    samples, rows = PATCH_NUMEL // (row * positions[0]), max(1, PATCH_NUMEL // row)
    if samples:
        for i in range(0, len(x), samples):
            yield x[i : i + samples]
        return
    for sample in x.unsqueeze(1):
        for top in range(0, positions[0], rows):
            last = min(top + rows, positions[0]) - 1
            yield sample[
                :, :, top * stride[0] : last * stride[0] + dilation[0] * (kernel[0] - 1) + 1
            ]
