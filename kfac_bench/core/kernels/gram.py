"""Products rows^T rows: the raw moments behind A and G.

A *raw moment* is a plain sum of outer products over the batch and shared positions. It has one
matrix per group of a grouped layer, [groups, n, n]; elsewhere groups = 1. Sums add up over
micro-batches and calls. :mod:`.conventions` scales them to factors once, at the end.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

TRIANGLE = 96
"""From this number of columns on, computing only one triangle of a product is faster."""


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32 if it is in half precision: factors need more than 8 bits."""
    return x if x.dtype == torch.float64 else x.float()


def gram(rows: Tensor, *, bias: bool = False) -> Tensor:
    """Return rows^T rows of [groups, R, d]: [groups, d, d], at least float32, exactly symmetric.

    With ``bias``, rows count as if they ended in a 1: [groups, d + 1, d + 1].
    """
    return sum_of_grams([rows], bias)


def sum_of_grams(parts: Iterable[Tensor], bias: bool) -> Tensor:
    """Return the :func:`gram` of ``parts`` [groups, R_i, d] stacked below each other."""
    out: Tensor | None = None
    for part in parts:
        rows = at_least_float32(part)
        groups, count, d = rows.shape
        # The first part writes (beta = 0), so the memory need not be cleared.
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
    """Compute the lower triangle of out = beta out + rows^T rows, block by block."""
    d = rows.shape[2]
    if d < TRIANGLE or not out.is_cpu:  # on a GPU one launch is faster than many
        out.baddbmm_(rows.mT, rows, beta=beta)
        return
    step = max(32, min(128, d // 4))  # narrow blocks save work, wide blocks run faster
    for o, r in zip(out, rows, strict=True):
        for i in range(0, d, step):
            j = min(i + step, d)
            o[i:j, :j].addmm_(r[:, i:j].mT, r[:, :j], beta=beta)


def _mirror_lower(x: Tensor, step: int = 128) -> Tensor:
    """Copy the lower triangle of [groups, n, n] onto the upper one, in place."""
    groups, n, _ = x.shape
    if not x.is_cpu:  # the product is complete except for the bias
        x[:, :, -1] = x[:, -1]
        return x
    # The copy has rows of another length: columns at distances of 2^k would share few cache lines.
    copy = x.new_empty(groups, step, n + 16)
    for i in range(0, n, step):
        j = min(i + step, n)
        if i:
            x[:, :i, i:j] = copy[:, : j - i, :i].copy_(x[:, i:j, :i]).mT
        square = x[:, i:j, i:j]
        square.tril_().add_(square.tril(-1).mT)
    return x


FEW_CHANNELS = 64
"""Up to this number of channels, one small product per image is faster than moving channels."""


def channel_gram(x: Tensor) -> Tensor:
    """Return the moment of channels of ``x`` [N, groups, C, pixels], without a copy.

    The sum goes over images and pixels; the result is [groups, C, C].
    """
    n, groups, c, _ = x.shape
    images = at_least_float32(x).flatten(0, 1)
    out = torch.bmm(images, images.mT).view(n, groups, c, c).sum(0)
    return (out + out.mT) / 2
