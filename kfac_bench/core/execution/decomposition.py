"""Decompositions of factors: how they are kept, sent and saved, and how they work on a gradient.

A factor becomes an :class:`Eigen` or an :class:`Inverse`, or if the factor is a diagonal a
:class:`DiagonalEigen` or a :class:`DiagonalInverse`. The solver makes decompositions, the store
keeps them, and messages carry them.

In half precision, matrices are kept and sent in two bytes per element; eigenvalues, diagonals and
scales stay in fp32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self, TypeVar

import torch
from torch import Tensor

from kfac_bench.core.kernels import linalg
from kfac_bench.core.kernels.gram import Blocks
from kfac_bench.core.planning.layer_spec import Factor

FactorKey = tuple[str, Factor]
"""A layer's name, and which of its factors."""


class TensorRecord:
    """A frozen dataclass of tensors [groups, ...], None where a tensor is not needed."""

    __slots__ = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are there."""
        values = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return tuple(x for x in values if x is not None)

    def split(self, groups: Sequence[int]) -> list[Self]:
        """Return views with so many groups each: the inverse of :func:`cat`."""
        each = (torch.split(x, list(groups)) for x in self.tensors)
        return [type(self)(*tensors) for tensors in zip(*each, strict=True)]


P = TypeVar("P", bound=TensorRecord)


def cat(each: Sequence[P]) -> P:
    """Return several of one type as one, side by side along the groups."""
    return type(each[0])(*map(torch.cat, zip(*(parts.tensors for parts in each), strict=True)))


@dataclass(frozen=True, slots=True)
class ScaledMatrix(TensorRecord):
    """A factor as a rank keeps it: [groups, n, n], or a diagonal [groups, n].

    Elements of factors are tiny and those of inverses huge, so in half precision a matrix is
    divided by its largest element. This ``scale`` [groups] is None where nothing was divided.
    """

    matrix: Tensor
    scale: Tensor | None = None

    @classmethod
    def keep(cls, matrix: Tensor, half: torch.dtype | None) -> Self:
        """Store a matrix or a diagonal; matrices in the dtype ``half`` if there is one."""
        if half is None or matrix.ndim < 3:
            return cls(matrix)
        scale = matrix.abs().amax((-2, -1)).clamp_min(torch.finfo(matrix.dtype).tiny)
        return cls((matrix / scale[:, None, None]).to(half), scale)

    def dense(self) -> Tensor:
        """Return the matrix in fp32 or fp64; the stored tensor itself if it was not scaled."""
        if self.scale is None:
            return self.matrix
        return self.matrix.to(self.scale.dtype) * self.scale[:, None, None]


@dataclass(frozen=True, slots=True)
class Eigen(TensorRecord):
    """A factor as Q diag(values) Q^T: values [groups, n], vectors Q [groups, n, n] in columns."""

    values: Tensor
    vectors: Tensor

    @property
    def basis(self) -> Tensor:
        """The eigenvectors in the dtype of the values, in which products are computed."""
        return self.vectors.to(self.values.dtype)

    def compact(self, half: torch.dtype | None) -> Self:
        """Return the decomposition in the precision in which a rank keeps it."""
        return self if half is None else type(self)(self.values, self.vectors.to(half))

    def saved(self) -> list[Tensor]:
        """Return the tensors that a saved state has of the decomposition."""
        return [self.values, self.basis]

    def pack(self, numbers: Tensor, matrix: Tensor) -> None:
        """Write into a message: values as bits into ``numbers``, vectors into ``matrix``."""
        numbers.copy_(self.values.flatten().view(numbers.dtype))
        matrix.copy_(self.vectors.flatten())

    @classmethod
    def unpack(cls, numbers: Tensor, matrix: Tensor, shape: tuple[int, ...]) -> Self:
        """Return a decomposition of views, which keep the memory of the message alive."""
        return cls(numbers.view(torch.float32).view(shape[:2]), matrix.view(shape))


@dataclass(frozen=True, slots=True)
class Inverse(ScaledMatrix):
    """The damped inverse of a factor, (factor + damping I)^-1 [groups, n, n]."""

    def compact(self, half: torch.dtype | None) -> Self:
        """Return the decomposition in the precision in which a rank keeps it."""
        return type(self).keep(self.matrix, half)

    def saved(self) -> list[Tensor]:
        """Return the tensor that a saved state has of the inverse."""
        return [self.dense()]

    def pack(self, numbers: Tensor, matrix: Tensor) -> None:
        """Write one triangle into a message; the scale, if there is one, as bits."""
        # The matrix is symmetric, so one triangle says all.
        linalg.pack_triangle(self.matrix, matrix)
        if self.scale is not None:
            numbers.copy_(self.scale.view(numbers.dtype))

    @classmethod
    def unpack(cls, numbers: Tensor, matrix: Tensor, shape: tuple[int, ...]) -> Self:
        """Return the inverse from a message, in new memory."""
        has_scale = numbers.dtype.itemsize < 4
        scale = numbers.clone().view(torch.float32) if has_scale else None
        return cls(linalg.unpack_triangle(matrix, shape), scale)


@dataclass(frozen=True, slots=True)
class Diagonal(TensorRecord):
    """The values of a decomposed diagonal factor, [groups, n], always in fp32 or fp64."""

    values: Tensor

    def compact(self, half: torch.dtype | None) -> Self:
        """Return the diagonal unchanged, because a diagonal is small."""
        return self

    def saved(self) -> list[Tensor]:
        """Return the tensor that a saved state has of it."""
        return [self.values]

    def pack(self, numbers: Tensor, matrix: Tensor) -> None:
        """Write the values as bits into a message."""
        numbers.copy_(self.values.flatten().view(numbers.dtype))

    @classmethod
    def unpack(cls, numbers: Tensor, matrix: Tensor, shape: tuple[int, ...]) -> Self:
        """Read them from a message into new memory."""
        return cls(numbers.clone().view(torch.float32).view(shape))


@dataclass(frozen=True, slots=True)
class DiagonalEigen(Diagonal):
    """A diagonal factor, which is its own eigenvalues."""

    @property
    def basis(self) -> None:
        """The eigenvectors are the identity."""
        return None


@dataclass(frozen=True, slots=True)
class DiagonalInverse(Diagonal):
    """The damped inverse of a diagonal factor, 1 / (factor + damping)."""

    def dense(self) -> Tensor:
        """Return the diagonal [groups, n]."""
        return self.values


AnyEigen = Eigen | DiagonalEigen
AnyInverse = Inverse | DiagonalInverse
Decomposition = AnyEigen | AnyInverse
SideDecomposition = Decomposition | tuple[Decomposition, ...]
"""The decomposition of A or of G; of a divided factor those of its blocks, in order."""


def values_of(side: SideDecomposition) -> Tensor:
    """Return the eigenvalues of A or G, [groups, n]."""
    if isinstance(side, tuple):
        return torch.cat([values_of(block) for block in side], -1)
    assert isinstance(side, AnyEigen)
    return side.values


def basis_of(side: SideDecomposition) -> Tensor | Blocks | None:
    """Return the eigenvectors of A or G; None if it is a diagonal."""
    if isinstance(side, tuple):
        return tuple(block.basis for block in side if isinstance(block, Eigen))
    assert isinstance(side, AnyEigen)
    return side.basis


def inverse_of(side: SideDecomposition) -> Tensor | Blocks:
    """Return the inverse of A or G, [groups, n, n]; of a diagonal [groups, n]."""
    if isinstance(side, tuple):
        return tuple(block.dense() for block in side if isinstance(block, Inverse))
    assert isinstance(side, AnyInverse)
    return side.dense()


def type_of(method: str, *, is_diagonal: bool) -> type[Decomposition]:
    """Return the type that ``method`` decomposes a factor into."""
    if method == "inverse":
        return DiagonalInverse if is_diagonal else Inverse
    return DiagonalEigen if is_diagonal else Eigen


def precondition(
    grad: Tensor,
    a: SideDecomposition,
    g: SideDecomposition,
    damping: float | None,
    *,
    second_moments: Tensor | None = None,
    has_factored_damping: bool = False,
) -> Tensor:
    """Multiply a gradient by the damped inverse of the curvature G kron A of its layer.

    Args:
        grad: The gradient, [groups, g_dim, a_dim].
        a: The decomposition of A.
        g: The decomposition of G. Inverses (eq. 9-10) contain the damping of the step in which
            they were made. Eigendecompositions (eq. 11-13) get the damping here.
        damping: The damping; None: relative to the mean eigenvalue.
        second_moments: EKFAC's second moments in the eigenbasis, [groups, g_dim, a_dim], which
            replace the eigenvalues (George et al. 2018).
        has_factored_damping: Whether the damping is split between A and G.
    """
    first = a[0] if isinstance(a, tuple) else a
    if isinstance(first, AnyInverse):
        return linalg.precondition_inverse(grad, inverse_of(a), inverse_of(g))
    if second_moments is None:
        values = linalg.damped_eigenvalues(
            values_of(a), values_of(g), damping, factored=has_factored_damping
        )
    else:
        values = linalg.damped_second_moments(second_moments, damping)
    return linalg.precondition_eigen(grad, basis_of(a), basis_of(g), values)
