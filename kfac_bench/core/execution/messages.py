"""Pack the tensors of one message into a bucket, a flat tensor, and unpack it on arrival.

Each kind of message has a ``pack`` and an ``unpack``. Both divide the bucket with :func:`parts`, in
the order of the op's members, so that they meet the same elements.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from kfac_bench.core.execution.decomposition import Decomposition, FactorKey, type_of
from kfac_bench.core.kernels.linalg import pack_triangle, unpack_triangle
from kfac_bench.core.planning.estimate import decomposition_parts, packed_numel
from kfac_bench.core.planning.layer_spec import Factor, LayerSpec
from kfac_bench.core.planning.plan import (
    GatherGradients,
    ReduceFactors,
    ReduceScales,
    ReduceSecondMoments,
    ShareDecompositions,
    ShareGradients,
)

Member = TypeVar("Member")

Statistics = MutableMapping[FactorKey, tuple[Tensor, Tensor]]
"""A statistic of this batch and its weight: the number of samples, a 0-d tensor."""

SecondMoments = MutableMapping[str, tuple[Tensor, Tensor]]
"""By layer: second moments [groups, g_dim, a_dim] of this batch, and their weight."""


def parts(
    bucket: Tensor, members: Sequence[Member], numels: Iterable[int]
) -> Iterator[tuple[Member, Tensor]]:
    """Yield each member with its part of the bucket: a view of ``numels`` elements."""
    return zip(members, torch.split(bucket, list(numels)), strict=True)


def pack_scales(op: ReduceScales, statistics: Statistics, bucket: Tensor) -> None:
    """Write the weight of each statistic, and its weight times its largest element."""
    for (spec, factor), part in parts(bucket, op.members, [2] * len(op.members)):
        statistic, weight = statistics[spec.name, factor]
        part[0] = weight
        part[1] = weight * statistic.abs().amax()


def unpack_scales(op: ReduceScales, bucket: Tensor, statistics: Statistics) -> None:
    """Scale the statistics so that their sum over ranks is of order 1, as half precision needs.

    The second entry of a statistic becomes its total weight and its mean size over ranks, with
    which :func:`unpack_factors` undoes the scaling.
    """
    tiny, most = torch.finfo(bucket.dtype).tiny, torch.finfo(bucket.dtype).max
    for (spec, factor), part in parts(bucket, op.members, [2] * len(op.members)):
        total, size = part[0], part[1]  # the size is the mean size times the total weight
        statistic, weight = statistics[spec.name, factor]
        # A statistic of zeros must stay zeros: a factor of infinity would make them NaN.
        statistic.mul_((weight / size.clamp_min(tiny)).clamp_max(most))
        mean_size = size / total.clamp_min(tiny)
        statistics[spec.name, factor] = statistic, torch.stack([total, mean_size])


def pack_factors(op: ReduceFactors, statistics: Statistics, bucket: Tensor) -> None:
    """Write statistics times their weights, so that a sum over ranks is a weighted sum.

    In half precision :func:`unpack_scales` has multiplied them by their weights already.
    """
    for (spec, factor), part in _factor_parts(op, bucket):
        statistic, weight = statistics[spec.name, factor]
        values = part if op.itemsize < 4 else part[:-1]
        if spec.is_diagonal(factor):
            values.copy_(statistic.flatten())
        else:
            pack_triangle(statistic, values)
        if op.itemsize == 4:
            part[:-1] *= weight
            part[-1] = weight


def unpack_factors(op: ReduceFactors, bucket: Tensor, statistics: Statistics) -> None:
    """Replace statistics by their weighted mean over ranks, weights by their sum."""
    for (spec, factor), part in _factor_parts(op, bucket):
        if op.itemsize < 4:
            weight, scale = statistics[spec.name, factor][1]
            values = part.float() * scale
        else:
            values, weight = _weighted_mean(part)
        shape = spec.factor_shape(factor)
        full = values.view(shape) if spec.is_diagonal(factor) else unpack_triangle(values, shape)
        statistics[spec.name, factor] = full, weight


def _factor_parts(
    op: ReduceFactors, bucket: Tensor
) -> Iterator[tuple[tuple[LayerSpec, Factor], Tensor]]:
    weight = 0 if op.itemsize < 4 else 1
    return parts(bucket, op.members, (packed_numel(*member) + weight for member in op.members))


def _weighted_mean(part: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and weight of a part [values..., weight], dividing in place."""
    weight = part[-1]
    part[:-1] /= weight.clamp_min(torch.finfo(part.dtype).tiny)
    return part[:-1], weight


def pack_second_moments(op: ReduceSecondMoments, moments: SecondMoments, bucket: Tensor) -> None:
    """Write second moments times their weights, and the weights."""
    for spec, part in _second_moment_parts(op, bucket):
        moment, weight = moments[spec.name]
        part[:-1] = moment.flatten()
        part[:-1] *= weight
        part[-1] = weight


def unpack_second_moments(op: ReduceSecondMoments, bucket: Tensor, moments: SecondMoments) -> None:
    """Replace second moments by their weighted mean over ranks, views into the bucket."""
    for spec, part in _second_moment_parts(op, bucket):
        mean, weight = _weighted_mean(part)
        moments[spec.name] = mean.view(spec.grad_shape), weight


def _second_moment_parts(
    op: ReduceSecondMoments, bucket: Tensor
) -> Iterator[tuple[LayerSpec, Tensor]]:
    return parts(bucket, op.members, (spec.grad_numel + 1 for spec in op.members))


def pack_decompositions(
    op: ShareDecompositions,
    decompositions: Mapping[FactorKey, Decomposition],
    method: str,
    bucket: Tensor,
) -> None:
    """Write decompositions in the precision in which ranks keep them."""
    for (spec, factor), numbers, matrix in _decomposition_parts(op, method, bucket):
        decompositions[spec.name, factor].pack(numbers, matrix)


def unpack_decompositions(
    op: ShareDecompositions, method: str, bucket: Tensor
) -> dict[FactorKey, Decomposition]:
    """Return decompositions: new tensors, or views that keep the bucket's memory alive."""
    received: dict[FactorKey, Decomposition] = {}
    for (spec, factor), numbers, matrix in _decomposition_parts(op, method, bucket):
        kind = type_of(method, is_diagonal=spec.is_diagonal(factor))
        received[spec.name, factor] = kind.unpack(numbers, matrix, spec.factor_shape(factor))
    return received


def _decomposition_parts(
    op: ShareDecompositions, method: str, bucket: Tensor
) -> Iterator[tuple[tuple[LayerSpec, Factor], Tensor, Tensor]]:
    """Yield, for each member, its parts for fp32 numbers and for the matrix.

    In a bucket of half precision, fp32 numbers travel as their bits: nothing computes with them.
    All numbers come before all matrices, so that they are aligned and can be viewed as fp32.
    """
    sizes = [decomposition_parts(*member, method, op.itemsize) for member in op.members]
    numbers, matrices = zip(*sizes, strict=True)
    twice = parts(bucket, (*op.members, *op.members), (*numbers, *matrices))
    views = [view for _, view in twice]
    count = len(op.members)
    return zip(op.members, views[:count], views[count:], strict=True)


def pack_gradients(op: ShareGradients, grads: Mapping[str, Tensor], bucket: Tensor) -> None:
    """Write preconditioned gradients, and zeros for a layer that backward did not reach."""
    for spec, part in gradient_parts(op, bucket):
        if spec.name in grads:
            part.copy_(grads[spec.name])
        else:
            part.zero_()


def gradient_parts(
    op: ShareGradients | GatherGradients, bucket: Tensor
) -> Iterator[tuple[LayerSpec, Tensor]]:
    """Yield each layer with its gradient [groups, g_dim, a_dim], a view into the bucket."""
    for spec, part in parts(bucket, op.members, (spec.grad_numel for spec in op.members)):
        yield spec, part.view(spec.grad_shape)
