"""The input patches of a convolution: their moment, their sum, and the patches themselves.

A patch is what one output position sees of the input: channels of a group times kernel offsets.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_bench.core.kernels.gram import at_least_float32, gram, multiplicand, sum_of_grams

PATCH_NUMEL = 1 << 20
"""Most elements of patches made at a time. 4 MiB in float32 stay in a CPU's cache until read."""

GPU_PATCH_NUMEL = 1 << 26
"""The limit on a GPU: 256 MiB, because each part costs the time of its calls there. Parts of
PATCH_NUMEL are about 1,100 products in a step of ResNet-50 with 64 images."""

AUTOCORRELATION_NUMEL = 1 << 15
"""Number of input elements from which :func:`autocorrelation_moment_3x3` is faster."""


def pad_input(x: Tensor, padding: Sequence[int], mode: str) -> Tensor:
    """Pad ``x`` as a convolution does.

    ``padding`` is in the order of F.pad; ``mode`` is the ``padding_mode`` of the convolution.
    """
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
    """Return the :func:`patch_moment` of an input without padding, in the fastest way."""
    if padding_mode == "zeros":
        met = _met_offsets(x.shape[2:], kernel, stride, padding, dilation)
        if [len(offsets) for offsets in met] != list(kernel):
            return _moment_of_met(x, met, kernel, stride, padding, dilation, groups, bias=bias)
    same_3x3 = (*kernel, *stride, *dilation, *padding) == (3, 3, 1, 1, 1, 1, 1, 1, 1, 1)
    if same_3x3 and padding_mode == "zeros" and groups == 1 and _autocorrelation_pays(x):
        return autocorrelation_moment_3x3(at_least_float32(x), bias=bias)
    x = pad_input(x, padding, padding_mode)
    return patch_moment(x, kernel, stride, dilation, groups, bias=bias)


def _met_offsets(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[range]:
    """Return, for each axis, the kernel offsets from the first to the last that meets a pixel.

    On a small image the outer offsets of a kernel may meet only padding.
    """
    met = []
    counts = output_size(sizes, kernel, stride, padding, dilation)
    befores = padding[-2::-2]  # F.pad begins with the last axis
    for size, k, s, before, count, d in zip(
        sizes, kernel, stride, befores, counts, dilation, strict=True
    ):
        meets = [
            offset
            for offset in range(k)
            if any(0 <= offset * d - before + s * i < size for i in range(count))
        ]
        met.append(range(meets[0], meets[-1] + 1) if meets else range(0))
    return met


def _moment_of_met(
    x: Tensor,
    met: Sequence[range],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    bias: bool,
) -> Tensor:
    """Return :func:`input_moment` if only the offsets ``met`` meet a pixel: the rest is zeros.

    A kernel of these offsets alone sees the same pixels, so its moment is a part of the whole.
    """
    columns = x.shape[1] // groups * math.prod(kernel)
    if not all(met):
        # Every patch is padding, so only the number of patches is not zero.
        out = x.new_zeros(groups, columns + bias, columns + bias, dtype=at_least_float32(x).dtype)
        if bias:
            counts = output_size(x.shape[2:], kernel, stride, padding, dilation)
            out[:, -1, -1] = len(x) * math.prod(counts)
        return out
    shorter = list(padding)
    for axis, offsets in enumerate(met):
        # Padding may become negative, which removes pixels that no offset meets.
        shorter[-2 - 2 * axis] -= offsets.start * dilation[axis]
        shorter[-1 - 2 * axis] -= (kernel[axis] - offsets.stop) * dilation[axis]
    part = input_moment(
        x, [len(offsets) for offsets in met], stride, shorter, "zeros", dilation, groups, bias=bias
    )
    numbers = torch.arange(columns, device=x.device).view(-1, *kernel)
    rows = numbers[:, *(slice(offsets.start, offsets.stop) for offsets in met)].flatten()
    if bias:
        rows = torch.cat([rows, rows.new_tensor([columns])])
    out = part.new_zeros(groups, columns + bias, columns + bias)
    out[:, rows.unsqueeze(-1), rows] = part
    return out


def _autocorrelation_pays(x: Tensor) -> bool:
    """Return whether it is faster; on a GPU that is not measured, so the answer is no."""
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
    """Return the moment of the input patches of a convolution, [groups, a, a].

    Columns are (channel of the group, *kernel offset), as in ``weight.flatten(1)``, and then the
    bias if there is one. ``x`` [N, C, *spatial] is padded already.
    """
    # A 1x1 kernel on a channels-last input: pixels are rows already, so nothing is copied.
    if math.prod(kernel) == 1 and x.stride(1) == 1:
        pixels = x[:, :, *(slice(None, None, s) for s in stride)].movedim(1, -1)
        return gram(pixels.reshape(-1, groups, x.shape[1] // groups).transpose(0, 1), bias=bias)

    columns = x.shape[1] // groups * math.prod(kernel)

    def parts() -> Iterator[Tensor]:
        # Patches overlap, so they are many times larger than x. A slab fits into the cache.
        for slab in _slabs(x, kernel, stride, dilation):
            slab = multiplicand(slab).contiguous()
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
    """Return the patches, [N, groups, positions, a], with the columns of :func:`patch_moment`."""
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
    """Return the sum of :func:`patch_rows` over positions, [N, groups, a]. Makes no patches."""
    meets = []
    for i, length in enumerate(x.shape[2:]):
        meet = x.new_zeros(length, kernel[i])
        count = _positions(length, kernel[i], stride[i], dilation[i])
        for offset in range(kernel[i]):
            start = offset * dilation[i]
            meet[start : start + (count - 1) * stride[i] + 1 : stride[i], offset] = 1
        meets.append(meet)
    return sum_by_offset(x, meets, groups)


def sum_by_offset(x: Tensor, meets: Sequence[Tensor], groups: int) -> Tensor:
    """Return the sum of patches over positions, [N, groups, a].

    Each spatial dimension is multiplied by a 0/1 matrix [pixels, offsets], which says which pixel
    meets which kernel offset. The last dimension goes first: it needs no copy, and the others are
    small afterwards.
    """
    n, c = x.shape[:2]
    x = at_least_float32(x)
    for i in reversed(range(len(meets))):
        x = (x.movedim(2 + i, -1) @ meets[i].to(x.dtype)).movedim(-1, 2 + i)
    return x.reshape(n, groups, c // groups * math.prod(x.shape[2:]))


def output_size(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Return the spatial shape of the output of a convolution; ``padding`` is that of F.pad."""
    befores, afters = padding[-2::-2], padding[-1::-2]  # F.pad begins with the last axis
    padded = map(sum, zip(sizes, befores, afters, strict=True))
    return list(map(_positions, padded, kernel, stride, dilation))


def _positions(size: int, kernel: int, stride: int, dilation: int) -> int:
    return (size - dilation * (kernel - 1) - 1) // stride + 1


def _patches(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return a view of x [N, C, *spatial] as [groups, channels, *kernel, N, *positions]."""
    n, c, *sizes = x.shape
    # A patch is a window into x: the same memory with other strides, no copy.
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
    """Yield parts of ``x`` that together have all its patches, of a limited number of elements.

    A part is some whole samples. Of a sample that is too large, a part is some output rows (of the
    first spatial dimension).
    """
    positions = list(map(_positions, x.shape[2:], kernel, stride, dilation))
    row = x.shape[1] * math.prod(kernel) * math.prod(positions[1:])
    limit = PATCH_NUMEL if x.is_cpu else GPU_PATCH_NUMEL
    # samples is 0 if a single sample is too large.
    samples, rows = limit // (row * positions[0]), max(1, limit // row)
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


_convolution_backward = torch.ops.aten.convolution_backward

OUT_OF_REACH = {0: -1, 2: 0}
"""Index of the line of pixels that a kernel offset never covers, by offset along the axis."""

CHANNELS_LAST = 64
"""Up to this number of channels a channels-last copy is faster: twice as fast at 16 channels."""


def autocorrelation_moment_3x3(x: Tensor, *, bias: bool = False) -> Tensor:
    """Return the moment [1, 9 C, 9 C] of 3x3 patches of ``x`` [N, C, H, W], without making patches.

    The convolution has stride 1 and zero padding 1; ``x`` is *not* padded. The moment has one block
    for each pair of kernel offsets d and e. The block sums x[q] x[q + e - d]^T over the pixels q
    that offset d covers. Offset 2 of an axis never covers the first line of pixels, and offset 0
    never covers the last line; otherwise all pixels count. So a block is an autocorrelation of the
    image at lag e - d, minus that of an edge or two. A corner that two edges share was subtracted
    twice, so it is added again.

    Columns are (c, ky, kx), as in ``weight.flatten(1)``, and then the bias if there is one. ``x``
    is float32 or float64.
    """
    n, c, h, w = x.shape
    if c <= CHANNELS_LAST:
        x = x.contiguous(memory_format=torch.channels_last)
    out = x.new_empty(1, 9 * c + bias, 9 * c + bias)
    blocks = out[0, : 9 * c, : 9 * c].view(c, 9, c, 9)
    lags = _image_lags(x)
    rows = {d: _line_lags(x[:, :, i]) for d, i in OUT_OF_REACH.items()}
    columns = {d: _line_lags(x[..., i]) for d, i in OUT_OF_REACH.items()}
    offsets = list(enumerate(itertools.product(range(3), range(3))))
    for (i, (dy, dx)), (j, (ey, ex)) in itertools.product(offsets, offsets):
        block = lags[ey - dy, ex - dx]
        # At a common offset on an axis, both pixels of a pair miss the same line.
        if dy == ey != 1:
            block = block - rows[dy][ex - dx]
        if dx == ex != 1:
            block = block - columns[dx][ey - dy]
        if i == j and dy != 1 != dx:
            corner = x[:, :, OUT_OF_REACH[dy], OUT_OF_REACH[dx]]
            block = block + _symmetric(corner.mT @ corner)
        blocks[:, i, :, j] = block
    if bias:
        out[0, -1, :-1] = out[0, :-1, -1] = _patch_sum(x)
        out[0, -1, -1] = n * h * w
    return out


def _image_lags(x: Tensor) -> dict[tuple[int, int], Tensor]:
    """Return, by lag in (-2..2)^2, the sum over n and q of x[q] x[q + lag]^T, [C, C].

    Pixels outside are zeros. The sums are the weight gradient of a convolution of x with itself, so
    one call of a fast kernel computes them. Half of the lags follow by symmetry.
    """
    c = x.shape[1]
    weight = x.new_empty(c, c, 3, 5)  # only its shape and its memory layout matter
    if x.is_contiguous(memory_format=torch.channels_last):
        weight = weight.contiguous(memory_format=torch.channels_last)
    padded = F.pad(x, (0, 0, 0, 2))
    half = _convolution_backward(
        x, padded, weight, None, [1, 1], [0, 2], [1, 1], False, [0, 0], 1, [False, True, False]
    )[1].permute(2, 3, 0, 1)
    # Each block is read up to nine times, so a contiguous copy is worth its cost.
    half = half.contiguous()
    mirrored = half.mT.contiguous()
    out = {}
    for y, x_ in itertools.product(range(3), range(-2, 3)):
        out[-y, -x_], out[y, x_] = mirrored[y, x_ + 2], half[y, x_ + 2]
    out[0, 0] = _symmetric(out[0, 0])
    return out


def _line_lags(line: Tensor) -> dict[int, Tensor]:
    """Return the same sums for a line of pixels [N, C, L] and lags -2..2."""
    pixels = line.permute(2, 0, 1).contiguous()
    out = {}
    for lag in range(3):
        pairs = max(0, len(pixels) - lag)
        out[lag] = pixels[:pairs].flatten(0, 1).mT @ pixels[lag:].flatten(0, 1)
        out[-lag] = out[lag].mT.contiguous()
    out[0] = _symmetric(out[0])
    return out


def _symmetric(x: Tensor) -> Tensor:
    """Mirror the lower triangle, so that rounding cannot make ``x`` asymmetric."""
    return x.tril() + x.tril(-1).mT


def _patch_sum(x: Tensor) -> Tensor:
    """Return the sum of the patches [9 C]: by offset, the sum of the pixels that it meets."""
    h, w = x.shape[2:]
    image = x.sum(0).contiguous()
    sums = [
        image[:, max(0, dy) : h + min(0, dy), max(0, dx) : w + min(0, dx)].sum((1, 2))
        for dy in (-1, 0, 1)
        for dx in (-1, 0, 1)
    ]
    return torch.stack(sums, dim=1).flatten()
