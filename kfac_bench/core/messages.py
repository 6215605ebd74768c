"""Buckets: what travels in one message, side by side in one flat tensor.

Each kind of message has a ``pack`` into the bucket and an ``unpack`` out of it; both walk the
op's members in the plan's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import torch
from torch import Tensor

from kfac_bench.core.linalg import pack_triangle, unpack_triangle
from kfac_bench.core.plan import (
    Factor,
    LayerSpec,
    ReduceFactors,
    ShareDecompositions,
    ShareGradients,
    decomposition_numel,
    packed_numel,
)

Decomposition = tuple[Tensor, ...]
"""Eigenvalues [n] and eigenvectors [n, n], or the damped inverse [n, n] alone."""

Statistics = MutableMapping[tuple[str, Factor], tuple[Tensor, Tensor]]
"""By layer and factor: a fresh statistic [n, n] and its weight, a 0-d tensor of samples."""

Decompositions = MutableMapping[tuple[str, Factor], Decomposition]


def pack_factors(op: ReduceFactors, fresh: Statistics, bucket: Tensor) -> None:
    """Statistics times their weights, so that a sum over ranks is a weighted sum."""
    for spec, factor, part in _factor_parts(op, bucket):
        statistic, weight = fresh[spec.name, factor]
        pack_triangle(statistic, part[:-1])
        part[:-1] *= weight
        part[-1] = weight


def unpack_factors(op: ReduceFactors, bucket: Tensor, fresh: Statistics) -> None:
    """The weighted mean over ranks, and the sum of the weights."""
    for spec, factor, part in _factor_parts(op, bucket):
        weight = part[-1]
        part[:-1] /= weight.clamp_min(torch.finfo(part.dtype).tiny)
        fresh[spec.name, factor] = unpack_triangle(part[:-1], spec.dim(factor)), weight


def _factor_parts(op: ReduceFactors, bucket: Tensor) -> Iterator[tuple[LayerSpec, Factor, Tensor]]:
    at = 0
    for spec, factor in op.members:
        numel = packed_numel(spec.dim(factor)) + 1
        yield spec, factor, bucket[at : at + numel]
        at += numel


def pack_decompositions(
    op: ShareDecompositions, method: str, source: Decompositions, bucket: Tensor
) -> None:
    """Eigenvalues then eigenvectors, or the inverse's triangle."""
    for spec, factor, part in _decomposition_parts(op, method, bucket):
        decomposition = source[spec.name, factor]
        if method == "eigen":
            torch.cat([x.flatten() for x in decomposition], out=part)
        else:
            pack_triangle(decomposition[0], part)


def unpack_decompositions(
    op: ShareDecompositions, method: str, bucket: Tensor, target: Decompositions
) -> None:
    """Views into the bucket, which lives as long as they do, or fresh inverses."""
    for spec, factor, part in _decomposition_parts(op, method, bucket):
        n = spec.dim(factor)
        target[spec.name, factor] = (
            (part[:n], part[n:].view(n, n)) if method == "eigen" else (unpack_triangle(part, n),)
        )


def _decomposition_parts(
    op: ShareDecompositions, method: str, bucket: Tensor
) -> Iterator[tuple[LayerSpec, Factor, Tensor]]:
    at = 0
    for spec, factor in op.members:
        numel = decomposition_numel(spec.dim(factor), method)
        yield spec, factor, bucket[at : at + numel]
        at += numel


def pack_gradients(op: ShareGradients, grads: Mapping[str, Tensor], bucket: Tensor) -> None:
    """Preconditioned gradients; zeros for a layer that backward did not reach."""
    for spec, part in _gradient_parts(op, bucket):
        if spec.name in grads:
            part.copy_(grads[spec.name])
        else:
            part.zero_()


def unpack_gradients(
    op: ShareGradients, bucket: Tensor, grads: MutableMapping[str, Tensor]
) -> None:
    """Views into the bucket."""
    for spec, part in _gradient_parts(op, bucket):
        grads[spec.name] = part


def _gradient_parts(op: ShareGradients, bucket: Tensor) -> Iterator[tuple[LayerSpec, Tensor]]:
    at = 0
    for spec in op.members:
        numel = spec.g_dim * spec.a_dim
        yield spec, bucket[at : at + numel].view(spec.g_dim, spec.a_dim)
        at += numel
