"""Make decompositions of running factors, and apply them to gradients."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from kfac_bench.core.execution import curvature
from kfac_bench.core.execution.decomposition import (
    DiagonalEigen,
    DiagonalInverse,
    Eigen,
    FactorKey,
    Inverse,
)
from kfac_bench.core.execution.store import Store, identity_like
from kfac_bench.core.kernels import linalg
from kfac_bench.core.planning.layer_spec import FACTORS, Factor, LayerSpec
from kfac_bench.core.planning.plan import IDENTITY

log = logging.getLogger(__name__)


class Solver:
    """The linear algebra on what a rank's ``store`` holds, by the method of the store."""

    def __init__(self, store: Store, *, factored_damping: bool = False) -> None:
        self._store, self._method = store, store.method
        self._has_factored_damping = factored_damping
        # Decompositions that failed in float32 and float64, since the start.
        self.failed = 0

    def decompose(self, members: Sequence[tuple[LayerSpec, Factor]], damping: float) -> None:
        """Decompose running factors of one shape together.

        If a factor cannot be decomposed, its last decomposition stays; if it has none, the factor
        counts as the identity.
        """
        keys = [(spec.name, factor) for spec, factor in members]
        spec, factor = members[0]
        if spec.is_diagonal(factor):
            self._store.keep_decompositions(
                {key: self._decompose_diagonal(key, damping) for key in keys}
            )
            return
        try:
            self._decompose_dense(keys, damping)
        except linalg.DecompositionError as error:
            # One bad matrix fails its whole batch, so the members are decomposed one by one.
            if len(members) > 1:
                for member in members:
                    self.decompose([member], damping)
                return
            self.failed += 1
            log.warning("%s of %s: %s; the last good one stays", *reversed(keys[0]), error)
            if keys[0] not in self._store.decompositions:
                self._store.keep_decompositions({keys[0]: self._identity(keys[0])})

    def _decompose_dense(self, keys: Sequence[FactorKey], damping: float) -> None:
        matrices = [self._store.factor(key) for key in keys]
        sizes = [len(matrix) for matrix in matrices]
        made: Eigen | Inverse
        if self._method == "inverse":
            dampings = [
                self._damping(key, damping).expand(size)
                for key, size in zip(keys, sizes, strict=True)
            ]
            made = Inverse(linalg.damped_inverse(stack(matrices), torch.cat(dampings)))
        else:
            made = Eigen(*linalg.eigendecompose(stack(matrices)))
        self._store.keep_decompositions(dict(zip(keys, made.split(sizes), strict=True)))

    def _decompose_diagonal(
        self, key: FactorKey, damping: float
    ) -> DiagonalEigen | DiagonalInverse:
        diagonal = self._store.factor(key)
        if self._method == "inverse":
            return DiagonalInverse(1 / (diagonal + self._damping(key, damping).unsqueeze(-1)))
        return DiagonalEigen(diagonal.clone())

    def _identity(self, key: FactorKey) -> Eigen | Inverse:
        eye = identity_like(self._store.factor(key), is_diagonal=False)
        if self._method == "inverse":
            return Inverse(eye)
        return Eigen(torch.ones_like(eye[..., 0]), eye)

    def _damping(self, key: FactorKey, damping: float) -> Tensor:
        """Return what the inverse method adds to a factor, [groups] or []."""
        name, factor = key
        if not self._has_factored_damping:
            # The weight only says on which device, and of which dtype, the number must be.
            return self._store.weights[key].new_full((), damping)
        means = [self._store.mean_eigenvalue((name, f)) for f in FACTORS]
        return linalg.split_damping(means[0], means[1], damping)[FACTORS.index(factor)]

    def precondition(self, specs: Sequence[LayerSpec], grad: Tensor, damping: float) -> Tensor:
        """Precondition gradients of layers of one shape, [layers * groups, g_dim, a_dim]."""
        if self._method == IDENTITY:
            return grad
        moments = self._store.second_moments
        has_moments = specs[0].name in moments
        layers = curvature.join(
            *self._store.stacked(specs),
            stack([moments[spec.name] for spec in specs]) if has_moments else None,
            has_factored_damping=self._has_factored_damping,
        )
        return layers.precondition(grad, damping)


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of layers of one shape as one; a single tensor is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
