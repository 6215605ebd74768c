"""Elements and bytes of what is kept and sent, from shapes alone."""

from __future__ import annotations

import math

from kfac_bench.core.planning.layer_spec import Factor, LayerSpec


def factor_numel(spec: LayerSpec, factor: Factor) -> int:
    """Elements of a factor as it is stored."""
    return math.prod(spec.factor_shape(factor))


def packed_numel(spec: LayerSpec, factor: Factor) -> int:
    """Elements of a factor as it is sent: of each block one triangle, its diagonal included."""
    n = spec.dim(factor)
    return spec.groups * (n if spec.diagonal(factor) else n * (n + 1) // 2)


def decomposition_numel(spec: LayerSpec, factor: Factor, method: str, itemsize: int = 4) -> int:
    """Elements sent for one decomposition: values and vectors, or the inverse's triangle.

    In half precision an fp32 value takes two elements, and each inverse has one, its size. A
    diagonal has values alone.
    """
    n, values_each = spec.dim(factor), 4 // itemsize
    if spec.diagonal(factor):
        return spec.groups * n * values_each
    if method == "inverse":
        return packed_numel(spec, factor) + (spec.groups * values_each if itemsize < 4 else 0)
    return spec.groups * (n * values_each + n * n)


def kept_bytes(spec: LayerSpec, factor: Factor, method: str, itemsize: int) -> tuple[int, int]:
    """Of a running factor, and of its decomposition, as ranks keep them.

    Eigenvalues, diagonals, and in half precision the size of each matrix, are fp32.
    """
    numel = factor_numel(spec, factor)
    if spec.diagonal(factor):
        return 4 * numel, 4 * numel
    matrix, scale = itemsize * numel, 4 * spec.groups * (itemsize < 4)
    values = 4 * spec.groups * spec.dim(factor)
    return matrix + scale, matrix + (scale if method == "inverse" else values)


def has_second_moment(spec: LayerSpec, method: str) -> bool:
    """Whether EKFAC rescales the layer; where a factor is diagonal, it stays with K-FAC's."""
    return method == "ekfac" and not (spec.a_diagonal or spec.g_diagonal)
