"""How the raw second moments behind A and G are computed, fast and exactly; how they are scaled.

A *raw moment* is a plain sum of outer products over batch and shared positions, one matrix per
group of a grouped layer: [groups, n, n], groups = 1 elsewhere. Sums add up over micro-batches and
calls; :data:`CONVENTIONS` turns them into factors once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_bench.core.kernels.autocorrelation import autocorrelation_moment_3x3

PATCH_NUMEL = 1 << 20
"""Patches made at a time: 4 MiB in float32 are still in the cache when the product reads them."""

TRIANGLE = 96
"""Columns from which on computing only one triangle of a product pays."""

AUTOCORRELATION_NUMEL = 1 << 15
"""Numbers in an input from which on its many calls pay: :func:`autocorrelation_moment_3x3`."""


def at_least_float32(x: Tensor) -> Tensor:
    """Half precisions become float32: nothing of K-FAC survives 8 bits of mantissa."""
    return x if x.dtype == torch.float64 else x.float()


def gram(rows: Tensor, *, bias: bool = False) -> Tensor:
    """rows^T rows of [groups, R, d], at least in float32: [groups, d, d], exactly symmetric.

    With ``bias`` that of rows that end in a 1: [groups, d + 1, d + 1].
    """
    return _sum_of_grams([rows], bias)


def _sum_of_grams(parts: Iterable[Tensor], bias: bool) -> Tensor:
    """The :func:`gram` of all ``parts`` [groups, R_i, d] below each other; at least one."""
    out: Tensor | None = None
    for part in parts:
        rows = at_least_float32(part)
        groups, count, d = rows.shape
        first = out is None
        if out is None:
            out = rows.new_empty(groups, d + bias, d + bias)
        _add_lower_gram(out[:, :d, :d], rows, beta=0 if first else 1)
        if bias:
            row_sum = rows.sum(1)
            out[:, d, :d] = row_sum if first else out[:, d, :d] + row_sum
            out[:, d, d] = count if first else out[:, d, d] + count
    assert out is not None
    return _mirror_lower(out)


def _add_lower_gram(out: Tensor, rows: Tensor, beta: int) -> None:
    """Half of the work of out = beta out + rows^T rows: only the lower triangle of blocks."""
    d = rows.shape[2]
    if d < TRIANGLE or not out.is_cpu:  # on a GPU one launch, until many are measured
        out.baddbmm_(rows.mT, rows, beta=beta)
        return
    step = max(32, min(128, d // 4))  # narrow blocks save work, wide ones are faster
    for o, r in zip(out, rows, strict=True):
        for i in range(0, d, step):
            j = min(i + step, d)
            o[i:j, :j].addmm_(r[:, i:j].mT, r[:, :j], beta=beta)


def _mirror_lower(x: Tensor, step: int = 128) -> Tensor:
    """Copy the lower triangle of [groups, n, n] onto the upper one, in place."""
    groups, n, _ = x.shape
    if not x.is_cpu:  # the product is whole but for the row of a bias
        x[:, :, -1] = x[:, -1]
        return x
    # Read from a copy with rows of another length: columns of 2^k numbers share few cache lines.
    copy = x.new_empty(groups, step, n + 16)
    for i in range(0, n, step):
        j = min(i + step, n)
        if i:
            x[:, :i, i:j] = copy[:, : j - i, :i].copy_(x[:, i:j, :i]).mT
        square = x[:, i:j, i:j]
        square.tril_().add_(square.tril(-1).mT)
    return x


FEW_CHANNELS = 64
"""Up to so many, one small product per image is faster than bringing channels together."""


def channel_gram(x: Tensor) -> Tensor:
    """Sum over images and pixels of [N, groups, C, pixels], without moving them: [groups, C, C]."""
    n, groups, c, _ = x.shape
    images = at_least_float32(x).flatten(0, 1)
    out = torch.bmm(images, images.mT).view(n, groups, c, c).sum(0)
    return (out + out.mT) / 2


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

    return _sum_of_grams(parts(), bias)


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


Scale = Callable[[int, float, bool], tuple[float, float]]
"""(samples N, shared positions s per sample, is a convolution) -> factors of raw A and raw G."""


def _kfc(n: int, s: float, conv: bool) -> tuple[float, float]:
    return 1 / (n * s), float(n)


def _sc20(n: int, s: float, conv: bool) -> tuple[float, float]:
    return (1 / (n * s**2), n * s) if conv else (1 / (n * s), n * s)


def _kaisa(n: int, s: float, conv: bool) -> tuple[float, float]:
    return (1 / (n * s**3), 1 / (n * s**3)) if conv else (1 / (n * s), 1 / (n * s))


CONVENTIONS: dict[str, Scale] = {"kfc": _kfc, "sc20": _sc20, "kaisa": _kaisa}
"""How raw moments (sum a a^T, sum g g^T; g the gradient of a loss that is a mean over N samples,
s shared positions each) become A and G. The same damping means another algorithm under each.

``kfc``: A = mean over samples and positions, G = N sum g g^T: the mean over samples of per-sample
gradients' moments, summed over positions; independent of batch size. The product is that of
Grosse & Martens 2016 (eq. 31 ff.) and of K-FAC-expand (Eschenhagen et al. 2023).
``sc20``: the code behind the paper's ResNet tables: convolutions' patches divided by s, g times
N s. ``kaisa``: SC21's code: both divided by s, g not multiplied by N, so G shrinks with the batch
size; a rank's G is that of its own part of the batch, so results depend on the number of ranks, as
SC21's do. In both, a Linear layer's positions count as samples.
"""
