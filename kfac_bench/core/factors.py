"""How the raw second moments behind A and G are computed, fast and exactly; how they are scaled.

A *raw moment* is a plain sum of outer products over batch and shared positions. Sums add up over
micro-batches and calls; :data:`CONVENTIONS` turns them into factors once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_convolution_backward = torch.ops.aten.convolution_backward


def at_least_float32(x: Tensor) -> Tensor:
    """Half precisions become float32: nothing of K-FAC survives 8 bits of mantissa."""
    return x if x.dtype == torch.float64 else x.float()


def gram(rows: Tensor) -> Tensor:
    """rows^T rows of [N, d], at least in float32, [d, d]."""
    rows = at_least_float32(rows)
    return rows.mT @ rows


def with_bias(moment: Tensor, row_sum: Tensor, rows: int) -> Tensor:
    """The moment of rows that end in a 1: [d + 1, d + 1] from [d, d] and the rows' sum [d]."""
    d = len(moment)
    out = moment.new_empty(d + 1, d + 1)
    out[:d, :d] = moment
    out[d, :d] = out[:d, d] = row_sum
    out[d, d] = rows
    return out


def patch_moment(
    x: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    *,
    bias: bool = False,
) -> Tensor:
    """Moment of a convolution's input patches; ``x`` [N, C, H, W] is padded already.

    Columns are ordered (c, ky, kx) like ``weight.flatten(1)``, then the bias if there is one.
    One channels-last copy of the patches and one product; the order is mended on the result.
    """
    n, c, h, w = x.shape
    (kh, kw), (sh, sw), (dh, dw) = kernel, stride, dilation
    out_h, out_w = (h - dh * (kh - 1) - 1) // sh + 1, (w - dw * (kw - 1) - 1) // sw + 1
    x = x.permute(0, 2, 3, 1).contiguous()  # [N, H, W, C]; no copy if channels-last
    steps = (h * w * c, sh * w * c, sw * c, dh * w * c, dw * c, 1)
    patches = x.as_strided((n, out_h, out_w, kh, kw, c), steps, x.storage_offset())
    rows = patches.reshape(n * out_h * out_w, kh * kw * c)
    moment = _channels_first(gram(rows), kh * kw, c)
    if not bias:
        return moment
    row_sum = rows.sum(0, dtype=moment.dtype).view(kh * kw, c).mT.reshape(-1)
    return with_bias(moment, row_sum, len(rows))


def autocorrelation_moment_3x3(x: Tensor, *, bias: bool = False) -> Tensor:
    """The same for a 3x3 kernel, stride 1, zero padding 1, without making patches.

    ``x`` [N, C, H, W] is *not* padded; H, W >= 2. Block (offset d, offset e) of the moment sums
    x[p + d] x[p + e]^T over positions p: away from the border it depends on e - d alone. So it is
    one autocorrelation, which is the weight gradient of a convolution of x with itself: one call
    into the fastest kernel there is. Half of the 5x5 offsets follow by symmetry; what the border
    cuts off (four edges, four corners) is subtracted exactly.
    """
    n, c, h, w = x.shape
    x = at_least_float32(x)
    lags = _autocorrelation(x)  # [25, C, C]
    d = torch.arange(3, device=x.device)
    dy, dx, ey, ex = d.view(3, 1, 1, 1), d.view(1, 3, 1, 1), d.view(1, 1, 3, 1), d.view(1, 1, 1, 3)
    moment = lags[(2 + ey - dy) * 5 + (2 + ex - dx)]  # [dy, dx, ey, ex, C, C]
    top, bottom, left, right = _edge_moments(x)
    moment[2, :, 2] -= top
    moment[0, :, 0] -= bottom
    moment[:, 2, :, 2] -= left
    moment[:, 0, :, 0] -= right
    corners = x[:, :, :: h - 1, :: w - 1].permute(2, 3, 0, 1).reshape(4, n, c)
    corner = torch.bmm(corners.mT, corners)
    moment[2, 2, 2, 2] -= corner[0]
    moment[2, 0, 2, 0] -= corner[1]
    moment[0, 2, 0, 2] -= corner[2]
    moment[0, 0, 0, 0] -= corner[3]
    square = moment.permute(4, 0, 1, 5, 2, 3).reshape(9 * c, 9 * c)
    return with_bias(square, _patch_sum_3x3(x), n * h * w) if bias else square


def _patch_sum_3x3(x: Tensor) -> Tensor:
    """Sum of the patches [9 C]: for offset d that of the window d leaves inside the image."""
    h, w = x.shape[2:]
    image = x.sum(0)
    sums = [
        image[:, max(0, dy) : h + min(0, dy), max(0, dx) : w + min(0, dx)].sum((1, 2))
        for dy in (-1, 0, 1)
        for dx in (-1, 0, 1)
    ]
    return torch.stack(sums, dim=1).flatten()


def _autocorrelation(x: Tensor) -> Tensor:
    """Sum over n, p of x[p] x[p + lag]^T for lags (-2..2)^2, [25, C, C], zeros outside."""
    c = x.shape[1]
    weight = x.new_zeros(c, c, 3, 5)
    if x.is_contiguous(memory_format=torch.channels_last):
        weight = weight.contiguous(memory_format=torch.channels_last)
    padded = F.pad(x, (0, 0, 0, 2))
    half = _convolution_backward(
        x, padded, weight, None, [1, 1], [0, 2], [1, 1], False, [0, 0], 1, [False, True, False]
    )[1].permute(2, 3, 0, 1)
    return torch.cat([half[1:].flip(0, 1).mT, half]).reshape(25, c, c)


def _edge_moments(x: Tensor) -> list[Tensor]:
    """1-D patch moments of the top, bottom, left and right edge, each [3, 3, C, C]."""
    n, c, h, w = x.shape
    edges = [x[:, :, 0], x[:, :, h - 1], x[..., 0], x[..., w - 1]]  # [N, C, length]
    out = []
    for edge in edges:
        padded = F.pad(edge, (1, 1)).permute(0, 2, 1).contiguous()  # [N, length + 2, C]
        length = edge.shape[2]
        rows = padded.as_strided((n, length, 3 * c), ((length + 2) * c, c, 1))
        out.append(gram(rows.reshape(-1, 3 * c)).view(3, c, 3, c).permute(0, 2, 1, 3))
    return out


def _channels_first(moment: Tensor, k: int, c: int) -> Tensor:
    """Reorder a [k c, k c] moment from (offset, channel) to (channel, offset)."""
    return moment.view(k, c, k, c).permute(1, 0, 3, 2).reshape(k * c, k * c)


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
