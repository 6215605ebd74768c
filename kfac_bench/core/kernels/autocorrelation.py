"""The second moment of 3x3 patches (stride 1, zero padding 1), without making patches.

The moment has one block for each pair of kernel offsets d and e. The block sums x[q] x[q + e - d]^T
over the pixels q that offset d meets. Offset 2 of an axis does not meet the first line of pixels,
and offset 0 does not meet the last line; otherwise all pixels count. So a block is an
autocorrelation of the image at lag e - d, minus that of an edge or two. A corner that two edges
share was subtracted twice, so it is added again.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

_convolution_backward = torch.ops.aten.convolution_backward

OUT_OF_REACH = {0: -1, 2: 0}
"""From an offset on an axis to the index of the line of pixels that it does not meet."""

CHANNELS_LAST = 64
"""Up to this number of channels a channels-last copy is faster: twice as fast at 16 channels."""


def autocorrelation_moment_3x3(x: Tensor, *, bias: bool = False) -> Tensor:
    """Return the moment [1, 9 C, 9 C] of the patches of ``x`` [N, C, H, W], which is *not* padded.

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
