"""Buckets: what travels in one message, side by side in one flat tensor.

Each kind of message has a ``pack`` into the bucket and an ``unpack`` out of it; both walk the
op's members in the plan's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import torch
from torch import Tensor

from kfac_bench.core.kernels.linalg import pack_triangle, unpack_triangle
from kfac_bench.core.planning.layer_spec import Factor, LayerSpec
from kfac_bench.core.planning.ops import (
    GatherGradients,
    ReduceFactors,
    ReduceScales,
    ReduceSecondMoments,
    ShareDecompositions,
    ShareGradients,
)
from kfac_bench.core.planning.sizes import decomposition_numel, packed_numel

Decomposition = tuple[Tensor, ...]
"""Eigenvalues [groups, n] and eigenvectors [groups, n, n], or the damped inverse alone; of a
diagonal factor its eigenvalues or their damped inverses [groups, n]. In half precision an inverse
is followed by its size [groups], which it was divided by."""

Statistics = MutableMapping[tuple[str, Factor], tuple[Tensor, Tensor]]
"""By layer and factor: a fresh statistic and its weight, a 0-d tensor of samples."""

SecondMoments = MutableMapping[str, tuple[Tensor, Tensor]]
"""By layer: fresh second moments [groups, g_dim, a_dim] and their weight."""

Decompositions = MutableMapping[tuple[str, Factor], Decomposition]


def pack_scales(op: ReduceScales, fresh: Statistics, bucket: Tensor) -> None:
    """Of each statistic its weight, and its weight times its largest element."""
    for i, (spec, factor) in enumerate(op.members):
        statistic, weight = fresh[spec.name, factor]
        bucket[2 * i] = weight
        bucket[2 * i + 1] = weight * statistic.abs().amax()


def unpack_scales(op: ReduceScales, bucket: Tensor, fresh: Statistics) -> None:
    """Statistics times their share of all weights over their mean size; what to undo it with.

    The sum over ranks of what becomes of the statistics is of order 1.
    """
    tiny = torch.finfo(bucket.dtype).tiny
    for i, (spec, factor) in enumerate(op.members):
        total, size = bucket[2 * i], bucket[2 * i + 1]  # the size is the mean times the total
        statistic, weight = fresh[spec.name, factor]
        statistic.mul_(weight / size.clamp_min(tiny))
        mean_size = size / total.clamp_min(tiny)
        fresh[spec.name, factor] = statistic, torch.stack([total, mean_size])


def pack_factors(op: ReduceFactors, fresh: Statistics, bucket: Tensor) -> None:
    """Statistics times their weights, so that a sum over ranks is a weighted sum.

    In half precision they are that already (:func:`unpack_scales`).
    """
    for spec, factor, part in _factor_parts(op, bucket):
        statistic, weight = fresh[spec.name, factor]
        values = part if op.itemsize < 4 else part[:-1]
        if spec.diagonal(factor):
            values.copy_(statistic.flatten())
        else:
            pack_triangle(statistic, values)
        if op.itemsize == 4:
            part[:-1] *= weight
            part[-1] = weight


def unpack_factors(op: ReduceFactors, bucket: Tensor, fresh: Statistics) -> None:
    """The weighted mean over ranks, and the sum of the weights."""
    for spec, factor, part in _factor_parts(op, bucket):
        if op.itemsize < 4:
            weight, scale = fresh[spec.name, factor][1]
            values = part.float() * scale
        else:
            values, weight = _weighted_mean(part)
        shape = spec.factor_shape(factor)
        full = values.view(shape) if spec.diagonal(factor) else unpack_triangle(values, shape)
        fresh[spec.name, factor] = full, weight


def _weighted_mean(part: Tensor) -> tuple[Tensor, Tensor]:
    weight = part[-1]
    part[:-1] /= weight.clamp_min(torch.finfo(part.dtype).tiny)
    return part[:-1], weight


def _factor_parts(op: ReduceFactors, bucket: Tensor) -> Iterator[tuple[LayerSpec, Factor, Tensor]]:
    at = 0
    for spec, factor in op.members:
        numel = packed_numel(spec, factor) + (0 if op.itemsize < 4 else 1)
        yield spec, factor, bucket[at : at + numel]
        at += numel


def pack_second_moments(op: ReduceSecondMoments, fresh: SecondMoments, bucket: Tensor) -> None:
    """Second moments times their weights."""
    for spec, part in _second_moment_parts(op, bucket):
        moment, weight = fresh[spec.name]
        part[:-1] = moment.flatten()
        part[:-1] *= weight
        part[-1] = weight


def unpack_second_moments(op: ReduceSecondMoments, bucket: Tensor, fresh: SecondMoments) -> None:
    """The weighted mean over ranks, views into the bucket, and the sum of the weights."""
    for spec, part in _second_moment_parts(op, bucket):
        mean, weight = _weighted_mean(part)
        fresh[spec.name] = mean.view(spec.grad_shape), weight


def _second_moment_parts(
    op: ReduceSecondMoments, bucket: Tensor
) -> Iterator[tuple[LayerSpec, Tensor]]:
    at = 0
    for spec in op.members:
        yield spec, bucket[at : at + spec.grad_numel + 1]
        at += spec.grad_numel + 1


def pack_decompositions(
    op: ShareDecompositions, method: str, source: Decompositions, bucket: Tensor
) -> None:
    """Eigenvalues and eigenvectors; or the inverse's triangle, and its size if it has one.

    Of a diagonal the values alone. What is fp32 in a bucket of half precision travels as its bits:
    nothing computes with them.
    """
    for spec, factor, numbers, matrix in _decomposition_parts(op, method, bucket):
        decomposition = source[spec.name, factor]
        if spec.diagonal(factor):
            numbers.copy_(decomposition[0].flatten().view(bucket.dtype))
        elif method == "inverse":
            pack_triangle(decomposition[0], matrix)
            if len(decomposition) > 1:
                numbers.copy_(decomposition[1].view(bucket.dtype))
        else:
            values, vectors = decomposition
            numbers.copy_(values.flatten().view(bucket.dtype))
            matrix.copy_(vectors.flatten())


def unpack_decompositions(
    op: ShareDecompositions, method: str, bucket: Tensor
) -> Iterator[tuple[tuple[str, Factor], Decomposition]]:
    """Views into the bucket, which lives as long as they do, or fresh inverses."""
    for spec, factor, numbers, matrix in _decomposition_parts(op, method, bucket):
        shape = spec.factor_shape(factor)
        if spec.diagonal(factor):
            yield (spec.name, factor), (numbers.clone().view(torch.float32).view(shape),)
        elif method == "inverse":
            size = [numbers.clone().view(torch.float32)] if len(numbers) else []
            yield (spec.name, factor), (unpack_triangle(matrix, shape), *size)
        else:
            values = numbers.view(torch.float32).view(shape[:2])
            yield (spec.name, factor), (values, matrix.view(shape))


def _decomposition_parts(
    op: ShareDecompositions, method: str, bucket: Tensor
) -> Iterator[tuple[LayerSpec, Factor, Tensor, Tensor]]:
    """Of each member its fp32 numbers and its matrix, or that one's triangle.

    All numbers come before all matrices: there they are aligned, so that views will do.
    """
    sizes = []
    for spec, factor in op.members:
        n = 0 if spec.diagonal(factor) else spec.dim(factor)
        triangle = n * (n + 1) // 2
        matrix = spec.groups * (triangle if method == "inverse" else n * n)
        sizes.append((decomposition_numel(spec, factor, method, op.itemsize) - matrix, matrix))
    at, after = 0, sum(numbers for numbers, _ in sizes)
    for (spec, factor), (numbers, matrix) in zip(op.members, sizes, strict=True):
        yield spec, factor, bucket[at : at + numbers], bucket[after : after + matrix]
        at, after = at + numbers, after + matrix


def pack_gradients(op: ShareGradients, grads: Mapping[str, Tensor], bucket: Tensor) -> None:
    """Preconditioned gradients; zeros for a layer that backward did not reach."""
    for spec, part in gradient_parts(op, bucket):
        if spec.name in grads:
            part.copy_(grads[spec.name])
        else:
            part.zero_()


def unpack_gradients(
    op: ShareGradients, bucket: Tensor, grads: MutableMapping[str, Tensor]
) -> None:
    """Views into the bucket."""
    for spec, part in gradient_parts(op, bucket):
        grads[spec.name] = part


def gradient_parts(
    op: ShareGradients | GatherGradients, bucket: Tensor
) -> Iterator[tuple[LayerSpec, Tensor]]:
    """Each layer's [groups, g_dim, a_dim], a view into the bucket."""
    at = 0
    for spec in op.members:
        yield spec, bucket[at : at + spec.grad_numel].view(spec.grad_shape)
        at += spec.grad_numel
