"""Elements and bytes of what is kept and sent, from shapes alone."""

import math

from kfac_bench.core.planning.layer_spec import Factor, LayerSpec
from kfac_bench.core.planning.plan import EIGEN_ADAM


def factor_numel(spec: LayerSpec, factor: Factor) -> int:
    """Return the elements of a factor as ranks keep it."""
    return math.prod(spec.factor_shape(factor))


def packed_numel(spec: LayerSpec, factor: Factor) -> int:
    """Return the elements of a factor in a message: one triangle of each block, or its diagonal."""
    n = spec.dim(factor)
    return spec.groups * (n if spec.is_diagonal(factor) else n * (n + 1) // 2)


def decomposition_parts(
    spec: LayerSpec, factor: Factor, method: str, itemsize: int = 4
) -> tuple[int, int]:
    """Return the elements that a message has for the numbers, and for the matrix, of one member.

    Numbers are eigenvalues, diagonals and, in half precision, the scale of an inverse. Each of
    them is fp32, and so two elements of a message in half precision. The matrix is that of the
    eigenvectors, or one triangle of an inverse.
    """
    n, groups, elements_each = spec.dim(factor), spec.groups, 4 // itemsize
    if spec.is_diagonal(factor):
        return groups * n * elements_each, 0
    if method == "inverse":
        return groups * elements_each if itemsize < 4 else 0, packed_numel(spec, factor)
    return groups * n * elements_each, groups * n * n


def decomposition_numel(spec: LayerSpec, factor: Factor, method: str, itemsize: int = 4) -> int:
    """Return the elements that a message has for one decomposition."""
    return sum(decomposition_parts(spec, factor, method, itemsize))


def kept_bytes(spec: LayerSpec, factor: Factor, method: str, itemsize: int) -> tuple[int, int]:
    """Return the bytes of a running factor, and of its decomposition, as ranks keep them.

    Eigenvalues, diagonals, and in half precision the scale of each matrix, are fp32.
    """
    numel = factor_numel(spec, factor)
    if spec.is_diagonal(factor):
        return 4 * numel, 4 * numel
    matrix, scale = itemsize * numel, 4 * spec.groups * (itemsize < 4)
    values = 4 * spec.groups * spec.dim(factor)
    return matrix + scale, matrix + (scale if method == "inverse" else values)


def moments_bytes(spec: LayerSpec, method: str) -> int:
    """Return the bytes of Adam's two moments on each gradient worker; only eigen_adam has them."""
    return 2 * 4 * spec.grad_numel if method == EIGEN_ADAM else 0


def has_second_moment(spec: LayerSpec, method: str) -> bool:
    """Return whether EKFAC has second moments of the layer: where neither factor is a diagonal."""
    return method == "ekfac" and not (spec.a_diagonal or spec.g_diagonal)
