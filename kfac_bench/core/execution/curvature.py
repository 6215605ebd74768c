"""The curvature of a layer: the decompositions of A and G, and how they precondition a gradient."""

from dataclasses import dataclass

from torch import Tensor

from kfac_bench.core.execution.decomposition import (
    AnyInverse,
    Whole,
    basis_of,
    inverse_of,
    values_of,
)
from kfac_bench.core.kernels import linalg


@dataclass(frozen=True, slots=True)
class EigenCurvature:
    """Eigendecompositions of A and G (eq. 11-13)."""

    a: Whole
    g: Whole
    has_factored_damping: bool

    def precondition(self, grad: Tensor, damping: float | None) -> Tensor:
        """Divide a gradient [groups, g_dim, a_dim] by the damped eigenvalues of G kron A."""
        values = linalg.damped_eigenvalues(
            values_of(self.a), values_of(self.g), damping, factored=self.has_factored_damping
        )
        return linalg.precondition_eigen(grad, basis_of(self.a), basis_of(self.g), values)


@dataclass(frozen=True, slots=True)
class EkfacCurvature:
    """Eigenvectors of A and G, and in place of eigenvalues the gradient's second moments.

    The ``second_moments`` [groups, g_dim, a_dim] are those in the eigenbasis (George et al. 2018).
    """

    a: Whole
    g: Whole
    second_moments: Tensor

    def precondition(self, grad: Tensor, damping: float | None) -> Tensor:
        """Divide a gradient [groups, g_dim, a_dim] by the damped second moments."""
        values = linalg.damped_second_moments(self.second_moments, damping)
        return linalg.precondition_eigen(grad, basis_of(self.a), basis_of(self.g), values)


@dataclass(frozen=True, slots=True)
class InverseCurvature:
    """Inverses of A and G (eq. 9-10), made with the damping of the step that decomposed."""

    a: Whole
    g: Whole

    def precondition(self, grad: Tensor, damping: float | None) -> Tensor:
        """Multiply a gradient [groups, g_dim, a_dim] by both inverses; ignore ``damping``."""
        return linalg.precondition_inverse(grad, inverse_of(self.a), inverse_of(self.g))


Curvature = EigenCurvature | EkfacCurvature | InverseCurvature


def join(
    a: Whole,
    g: Whole,
    second_moments: Tensor | None,
    *,
    has_factored_damping: bool,
) -> Curvature:
    """Join the decompositions of A and G; ``second_moments`` are None but for EKFAC."""
    first = a[0] if isinstance(a, tuple) else a
    if isinstance(first, AnyInverse):
        return InverseCurvature(a, g)
    if second_moments is None:
        return EigenCurvature(a, g, has_factored_damping)
    return EkfacCurvature(a, g, second_moments)
