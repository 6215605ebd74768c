"""The curvature of a layer: the decompositions of A and G, and how they precondition a gradient."""

from dataclasses import dataclass

from torch import Tensor

from kfac_bench.core.execution.decomposition import AnyEigen, AnyInverse, Decomposition
from kfac_bench.core.kernels import linalg


@dataclass(frozen=True, slots=True)
class EigenCurvature:
    """Eigendecompositions of A and G (eq. 11-13)."""

    a: AnyEigen
    g: AnyEigen
    has_factored_damping: bool

    def precondition(self, grad: Tensor, damping: float | None) -> Tensor:
        """Divide a gradient [groups, g_dim, a_dim] by the damped eigenvalues of G kron A."""
        values = linalg.damped_eigenvalues(
            self.a.values, self.g.values, damping, factored=self.has_factored_damping
        )
        return linalg.precondition_eigen(grad, self.a.basis, self.g.basis, values)


@dataclass(frozen=True, slots=True)
class EkfacCurvature:
    """Eigenvectors of A and G, and in place of eigenvalues the gradient's second moments.

    The ``second_moments`` [groups, g_dim, a_dim] are those in the eigenbasis (George et al. 2018).
    """

    a: AnyEigen
    g: AnyEigen
    second_moments: Tensor

    def precondition(self, grad: Tensor, damping: float | None) -> Tensor:
        """Divide a gradient [groups, g_dim, a_dim] by the damped second moments."""
        values = linalg.damped_second_moments(self.second_moments, damping)
        return linalg.precondition_eigen(grad, self.a.basis, self.g.basis, values)


@dataclass(frozen=True, slots=True)
class InverseCurvature:
    """Inverses of A and G (eq. 9-10), made with the damping of the step that decomposed."""

    a: AnyInverse
    g: AnyInverse

    def precondition(self, grad: Tensor, damping: float | None) -> Tensor:
        """Multiply a gradient [groups, g_dim, a_dim] by both inverses; ignore ``damping``."""
        return linalg.precondition_inverse(grad, self.a.dense(), self.g.dense())


Curvature = EigenCurvature | EkfacCurvature | InverseCurvature


def join(
    a: Decomposition,
    g: Decomposition,
    second_moments: Tensor | None,
    *,
    has_factored_damping: bool,
) -> Curvature:
    """Join the decompositions of A and G; ``second_moments`` are None but for EKFAC."""
    if isinstance(a, AnyInverse) and isinstance(g, AnyInverse):
        return InverseCurvature(a, g)
    if isinstance(a, AnyEigen) and isinstance(g, AnyEigen):
        if second_moments is None:
            return EigenCurvature(a, g, has_factored_damping)
        return EkfacCurvature(a, g, second_moments)
    raise TypeError(f"A is a {type(a).__name__} and G a {type(g).__name__}: not of one method")
