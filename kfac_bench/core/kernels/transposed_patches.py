"""The input patches of a transposed convolution: their moment, their sum, and the patches.

A transposed convolution of stride S is a convolution of stride 1 whose input has S - 1 zeros
between its pixels, with a mirrored kernel. A patch is what one output position sees of this input:
channels of a group times kernel taps. Columns are (channel of the group, *tap), where taps are in
the order of the module's weight.

No zeros are inserted. Along each axis, output positions whose distance is a multiple of S see the
same taps; these positions are a *phase*. All other taps meet zeros there. So each phase is a
convolution of stride 1 on the input itself, with a smaller kernel.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_bench.core.kernels.gram import at_least_float32
from kfac_bench.core.kernels.patches import input_moment, pad_input, patch_rows, sum_by_offset


class Geometry(NamedTuple):
    """The shape of one call of a transposed convolution, without samples and channels."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    size: Sequence[int]
    """Spatial shape of the output. It contains the output padding, which each call may choose."""


def transposed_moment(x: Tensor, shape: Geometry, *, bias: bool = False) -> Tensor:
    """Return the moment of the patches, [groups, a, a]; with ``bias``, patches end in a 1.

    A patch is zero outside the columns of its phase, so the moment has one block per phase.
    """
    n = x.shape[1] // shape.groups * math.prod(shape.kernel)
    out = at_least_float32(x).new_zeros(shape.groups, n + bias, n + bias)
    # A 2x2 kernel of stride 2 has four phases that see the same patches: one product is enough.
    blocks: dict[tuple[object, ...], Tensor] = {}
    for phase in _phases(x, shape):
        key = (phase.kernel, *phase.pads, *phase.dilation)
        if key not in blocks:
            blocks[key] = input_moment(
                x,
                phase.kernel,
                [1 for _ in phase.kernel],
                phase.pads,
                "zeros",
                phase.dilation,
                shape.groups,
                bias=bias,
            )
        block, at = blocks[key], phase.columns
        out[:, at[:, None], at] = block[:, : len(at), : len(at)]
        if bias:
            out[:, -1, at] = out[:, at, -1] = block[:, -1, :-1]
    if bias:
        # Positions that see no pixel have a bias, too.
        out[:, -1, -1] = len(x) * math.prod(shape.size)
    return out


def transposed_rows(x: Tensor, shape: Geometry) -> Tensor:
    """Return the patches, [N, groups, positions, a]."""
    columns = x.shape[1] // shape.groups * math.prod(shape.kernel)
    out = x.new_zeros(len(x), shape.groups, *shape.size, columns)
    for phase in _phases(x, shape):
        padded = pad_input(x, phase.pads, "zeros")
        ones = [1 for _ in phase.kernel]
        rows = patch_rows(padded, phase.kernel, ones, phase.dilation, shape.groups)
        part = out[:, :, *phase.positions]
        part[..., phase.columns] = rows.reshape(*part.shape[:-1], -1)
    return out.flatten(2, -2)


def transposed_sum(x: Tensor, shape: Geometry) -> Tensor:
    """Return the sum of :func:`transposed_rows` over positions, [N, groups, a].

    A pixel meets a tap if the output has the position to which the tap sends the pixel.
    """
    meets = []
    for i, length in enumerate(x.shape[2:]):
        pixels = torch.arange(length, device=x.device).unsqueeze(1) * shape.stride[i]
        taps = torch.arange(shape.kernel[i], device=x.device) * shape.dilation[i]
        positions = pixels + taps - shape.padding[i]
        meets.append((positions >= 0) & (positions < shape.size[i]))
    return sum_by_offset(x, meets, shape.groups)


class _Phase(NamedTuple):
    """Output positions that see the same taps, as a convolution of stride 1 and zero padding."""

    positions: tuple[slice, ...]
    kernel: Sequence[int]
    pads: Sequence[int]
    """Paddings in the order of F.pad; a negative number crops."""
    dilation: Sequence[int]
    columns: Tensor
    """The columns of the whole patch that the columns of this convolution belong to."""


def _phases(x: Tensor, shape: Geometry) -> Iterator[_Phase]:
    channels, axes = x.shape[1] // shape.groups, range(len(shape.kernel))
    columns = torch.arange(channels * math.prod(shape.kernel), device=x.device)
    columns = columns.view(channels, *shape.kernel)
    for along in itertools.product(*(_phases_along(i, x.shape[2 + i], shape) for i in axes)):
        used = columns[:, *(axis.taps for axis in along)]
        yield _Phase(
            tuple(axis.positions for axis in along),
            used.shape[1:],
            [pad for axis in reversed(along) for pad in axis.pads],  # F.pad starts at the last axis
            [axis.dilation for axis in along],
            # The kernel is mirrored: the first pixel of a patch meets the last tap.
            used.flip([1 + i for i in axes]).flatten(),
        )


class _PhaseAlong(NamedTuple):
    """A phase along one axis."""

    positions: slice
    taps: slice
    pads: tuple[int, int]
    dilation: int


def _phases_along(axis: int, length: int, shape: Geometry) -> list[_PhaseAlong]:
    """Return the phases along one axis that see a pixel; ``length`` is that of the input."""
    kernel, stride, size = shape.kernel[axis], shape.stride[axis], shape.size[axis]
    padding, dilation = shape.padding[axis], shape.dilation[axis]
    # Tap t sends pixel q to the position q stride - padding + t dilation. So a phase sees every
    # ``step``-th tap, and these taps meet pixels at a distance of dilation / common.
    common = math.gcd(stride, dilation)
    step = stride // common
    phases = []
    for first_tap in range(min(kernel, step)):
        last_tap = range(first_tap, kernel, step)[-1]
        first = (first_tap * dilation - padding) % stride
        positions = range(first, size, stride)
        # The pixels that these positions see, from the first position's to the last position's.
        start = (first + padding - last_tap * dilation) // stride
        end = (first + padding - first_tap * dilation) // stride + len(positions)
        if positions and start < length and end > 0:
            phases.append(
                _PhaseAlong(
                    slice(first, None, stride),
                    slice(first_tap, None, step),
                    (-start, end - length),
                    dilation // common,
                )
            )
    return phases
