"""Block-diagonal matrices: products with them, and their blocks inside a moment.

``KFAC(block_size=N)`` divides large factors into diagonal blocks. A block-diagonal matrix is the
tuple of its blocks, and never made as one tensor.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

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
