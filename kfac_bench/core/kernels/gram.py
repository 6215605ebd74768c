"""Raw moments behind A and G: products rows^T rows, their diagonal blocks, and their scales.

A *raw moment* is a plain sum of outer products over the batch and shared positions. It has one
matrix per group of a grouped layer, [groups, n, n]; elsewhere groups = 1. Sums add up over
micro-batches and calls. At the end a convention scales them to factors once.

``KFAC(block_size=N)`` divides large factors into diagonal blocks. A block-diagonal matrix is the
tuple of its blocks, and never made as one tensor.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

TRIANGLE = 96
"""Number of columns from which computing only one triangle of a product is faster."""


HAS_OUT_DTYPE = hasattr(torch.ops.aten.bmm, "dtype") and torch.version.hip is None
"""Whether torch multiplies half precision into float32: from torch 2.8, with CUDA."""


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32 if it is in half precision: factors need more than 8 bits."""
    return x if x.dtype == torch.float64 else x.float()


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which products on the device of ``x`` keep their precision."""
    device = x.device.type
    # The meta device of dry runs has no autocast.
    has_autocast = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if has_autocast else nullcontext()


def multiplicand(x: Tensor) -> Tensor:
    """Return ``x`` for a :func:`product`: in float32, or as it is if that is as good.

    A GPU multiplies numbers in half precision exactly, and sums in float32. The sum has an error of
    at most 1e-4 of the largest element (tests/core/test_cuda.py).
    """
    is_good = x.is_cuda and x.dtype.itemsize < 4 and HAS_OUT_DTYPE
    return x if is_good else at_least_float32(x)


def product(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y of [groups, n, k] and [groups, k, m], at least float32."""
    if x.dtype.itemsize >= 4:
        return torch.bmm(x, y)
    if len(x) == 1:
        return torch.mm(x[0], y[0], out_dtype=torch.float32).unsqueeze(0)
    return torch.bmm(x, y, out_dtype=torch.float32)


def gram(rows: Tensor, *, bias: bool = False) -> Tensor:
    """Return rows^T rows of [groups, R, d]: [groups, d, d], at least float32, exactly symmetric.

    With ``bias``, rows count as if they ended in a 1: [groups, d + 1, d + 1].
    """
    return sum_of_grams([rows], bias)


def sum_of_grams(parts: Iterable[Tensor], bias: bool) -> Tensor:
    """Return the :func:`gram` of ``parts`` [groups, R_i, d] stacked below each other."""
    out: Tensor | None = None
    for part in parts:
        rows = multiplicand(part)
        groups, count, d = rows.shape
        dtype = torch.promote_types(rows.dtype, torch.float32)
        # The first part writes (beta = 0), so the memory need not be cleared.
        first = out is None
        if out is None:
            out = rows.new_empty(groups, d + bias, d + bias, dtype=dtype)
        _add_lower_gram(out[:, :d, :d], rows, beta=0 if first else 1)
        if bias:
            row_sum = rows.sum(1, dtype=dtype)
            out[:, d, :d] = row_sum if first else out[:, d, :d] + row_sum
            out[:, d, d] = count if first else out[:, d, d] + count
    assert out is not None
    if bias or out.is_cpu:
        return _mirror_lower(out)
    return out  # one product has made all of it


def _add_lower_gram(out: Tensor, rows: Tensor, beta: int) -> None:
    """Compute the lower triangle of out = beta out + rows^T rows, block by block."""
    d = rows.shape[2]
    if rows.dtype.itemsize < 4:
        whole = product(rows.mT, rows)
        out.copy_(whole) if beta == 0 else out.add_(whole)
        return
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
    images = multiplicand(x).flatten(0, 1)
    out = product(images, images.mT).view(n, groups, c, c).sum(0)
    return (out + out.mT) / 2


Blocks = tuple[Tensor, ...]
"""The diagonal blocks of a matrix, in order, each [groups, b, b]."""


def transposed(blocks: Blocks) -> Blocks:
    """Return the transpose of a block-diagonal matrix."""
    return tuple(block.mT for block in blocks)


def times(x: Tensor, right: Blocks) -> Tensor:
    """Return x @ right of x [..., rows, n] and a block-diagonal matrix [..., n, n]."""
    parts = torch.split(x, [block.shape[-1] for block in right], -1)
    return torch.cat([part @ block for part, block in zip(parts, right, strict=True)], -1)


def left_times(left: Blocks, x: Tensor) -> Tensor:
    """Return left @ x of a block-diagonal matrix [..., n, n] and x [..., n, columns]."""
    parts = torch.split(x, [block.shape[-1] for block in left], -2)
    return torch.cat([block @ part for block, part in zip(left, parts, strict=True)], -2)


def flat_blocks(moment: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the diagonal blocks of a moment [groups, n, n] side by side, [groups, numel].

    The result is the moment itself if it has this form already, or if there are no ``sizes``.
    """
    if not sizes or moment.ndim < 3:
        return moment
    blocks = []
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        rows = slice(end - size, end)
        blocks.append(moment[:, rows, rows])
    return join_flat(blocks)


def join_flat(blocks: Sequence[Tensor]) -> Tensor:
    """Return blocks [groups, b, b] side by side, [groups, sum of b^2]."""
    return torch.cat([block.flatten(1) for block in blocks], 1)


def block_of(flat: Tensor, sizes: Sequence[int], index: int) -> Tensor:
    """Return one block [groups, b, b] of what :func:`flat_blocks` returned: a view."""
    first, size = sum(n * n for n in sizes[:index]), sizes[index]
    return flat[:, first : first + size * size].view(len(flat), size, size)


Number = float | Tensor
"""A number, or a 0-d tensor on the device that the host does not know."""

Scale = Callable[[Number, Number, bool], tuple[Number, Number]]
"""A function that returns the scales of raw A and raw G. Its arguments are the samples N, the
positions s per sample, and true for a convolution."""


def _kfc(n: Number, s: Number, conv: bool) -> tuple[Number, Number]:
    return 1 / (n * s), n


def _sc20(n: Number, s: Number, conv: bool) -> tuple[Number, Number]:
    return (1 / (n * s**2), n * s) if conv else (1 / (n * s), n * s)


def _kaisa(n: Number, s: Number, conv: bool) -> tuple[Number, Number]:
    return (1 / (n * s**3), 1 / (n * s**3)) if conv else (1 / (n * s), 1 / (n * s))


CONVENTIONS: dict[str, Scale] = {"kfc": _kfc, "sc20": _sc20, "kaisa": _kaisa}
"""Scales that turn raw moments into the factors A and G, by name of the convention.

Raw moments are sum a a^T and sum g g^T, where g is the gradient of a loss that is a mean over N
samples with s shared positions each. The same damping means another algorithm under each
convention.

* ``kfc``: A is the mean over samples and positions; G = N sum g g^T. So G is the mean over samples
  of the moments of per-sample gradients, summed over positions. It does not depend on the batch
  size. The product is that of Grosse & Martens 2016 (eq. 31 ff.) and of K-FAC-expand (Eschenhagen
  et al. 2023). If the loss is a mean over s terms of each sample (tokens, pixels), it is 1 / s of
  the Gauss-Newton matrix.
* ``sc20``: as in the code behind the paper's ResNet tables. Patches of convolutions are divided by
  s, and g is multiplied by N s.
* ``kaisa``: as in the code of KAISA (SC 2021). Both are divided by s, and g is not multiplied by N.
  So G shrinks with the batch size. The G of a rank belongs to its own part of the batch, so results
  depend on the number of ranks, as in that code.

In ``kfc`` the N of G counts the examples of the model (:class:`.examples.Examples`). In ``sc20``
and ``kaisa`` the input of each layer counts, and positions of a Linear layer count as samples.
"""
