"""The second moment of 3x3 patches, stride 1, zero padding 1, without making patches.

Block (offset d, offset e) of the moment sums x[q] x[q + e - d]^T over the pixels q that d meets.
Those are all of them, but at offset 2 of an axis the first line of pixels is out of reach, and at
offset 0 the last one. So every block is an autocorrelation of the image at lag e - d, less that of
an edge or two; what two edges share, a corner, is added again.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

_convolution_backward = torch.ops.aten.convolution_backward

OUT_OF_REACH = {0: -1, 2: 0}
"""Offset on an axis: index of the line of pixels that it does not meet."""

CHANNELS_LAST = 64
"""Up to so many channels the convolution is faster on a channels-last copy, at 16 twice."""


def autocorrelation_moment_3x3(x: Tensor, *, bias: bool = False) -> Tensor:
    """Moment [1, 9 C, 9 C] of the patches of ``x`` [N, C, H, W], float32 or 64, *not* padded.

    Columns (c, ky, kx) as in ``weight.flatten(1)``, then the bias if there is one.
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
    """By lag in (-2..2)^2, the sum over n, q of x[q] x[q + lag]^T, [C, C]; zeros outside.

    This is the weight gradient of a convolution of x with itself: one call into the fastest kernel
    there is. Half of the lags follow by symmetry.
    """
    c = x.shape[1]
    weight = x.new_empty(c, c, 3, 5)  # only its shape and its layout are used
    if x.is_contiguous(memory_format=torch.channels_last):
        weight = weight.contiguous(memory_format=torch.channels_last)
    padded = F.pad(x, (0, 0, 0, 2))
    half = _convolution_backward(
        x, padded, weight, None, [1, 1], [0, 2], [1, 1], False, [0, 0], 1, [False, True, False]
    )[1].permute(2, 3, 0, 1)
    half = half.contiguous()  # each block is read up to nine times
    mirrored = half.mT.contiguous()
    out = {}
    for y, x_ in itertools.product(range(3), range(-2, 3)):
        out[-y, -x_], out[y, x_] = mirrored[y, x_ + 2], half[y, x_ + 2]
    out[0, 0] = _symmetric(out[0, 0])
    return out


def _line_lags(line: Tensor) -> dict[int, Tensor]:
    """The same for a line of pixels [N, C, L] and lags -2..2."""
    pixels = line.permute(2, 0, 1).contiguous()
    out = {}
    for lag in range(3):
        pairs = max(0, len(pixels) - lag)
        out[lag] = pixels[:pairs].flatten(0, 1).mT @ pixels[lag:].flatten(0, 1)
        out[-lag] = out[lag].mT.contiguous()
    out[0] = _symmetric(out[0])
    return out


def _symmetric(x: Tensor) -> Tensor:
    """Exactly symmetric, whatever the order in which a product was summed."""
    return x.tril() + x.tril(-1).mT


def _patch_sum(x: Tensor) -> Tensor:
    """Sum of the patches [9 C]: for offset d that of the window d leaves inside the image."""
    h, w = x.shape[2:]
    image = x.sum(0).contiguous()
    sums = [
        image[:, max(0, dy) : h + min(0, dy), max(0, dx) : w + min(0, dx)].sum((1, 2))
        for dy in (-1, 0, 1)
        for dx in (-1, 0, 1)
    ]
    return torch.stack(sums, dim=1).flatten()
