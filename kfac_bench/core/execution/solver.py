"""From running factors to decompositions, and from gradients to preconditioned ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from kfac_bench.core.execution.messages import Decomposition
from kfac_bench.core.execution.store import Key, Store, dense, identity_like
from kfac_bench.core.kernels import linalg
from kfac_bench.core.planning.layer_spec import FACTORS, Factor, LayerSpec
from kfac_bench.core.planning.plan import IDENTITY

log = logging.getLogger(__name__)


class Solver:
    """The linear algebra on what a rank's ``store`` holds, by the method of that."""

    def __init__(self, store: Store, *, factored_damping: bool = False) -> None:
        self._store, self._method = store, store.method
        self._factored_damping = factored_damping
        self.failed = 0
        """Decompositions that failed in float32 and float64, since the start."""

    def decompose(self, members: Sequence[tuple[LayerSpec, Factor]], damping: float) -> None:
        """Running factors of one shape, together; one that fails keeps its last decomposition."""
        keys = [(spec.name, factor) for spec, factor in members]
        if all(spec.diagonal(factor) for spec, factor in members):
            self._store.keep_decompositions(
                {key: self._decompose_diagonal(key, damping) for key in keys}
            )
            return
        matrices = [self._store.factor(key) for key in keys]
        try:
            dampings = torch.cat(
                [
                    self._damping(k, damping).expand(len(m))
                    for k, m in zip(keys, matrices, strict=True)
                ]
            )
            done = self._decompose_dense(stack(matrices), dampings)
        except linalg.DecompositionError as error:
            if len(members) > 1:  # one bad matrix fails its whole batch: one by one
                for member in members:
                    self.decompose([member], damping)
                return
            self.failed += 1
            log.warning("%s of %s: %s; the last good one stays", *reversed(keys[0]), error)
            if keys[0] in self._store.decompositions:
                return
            eye = identity_like(matrices[0], diagonal=False)
            done = (eye,) if self._method == "inverse" else (torch.ones_like(eye[..., 0]), eye)
        sizes = [len(m) for m in matrices]
        parts = zip(*(torch.split(x, sizes) for x in done), strict=True)
        self._store.keep_decompositions(dict(zip(keys, parts, strict=True)))

    def _decompose_dense(self, matrices: Tensor, damping: Tensor) -> Decomposition:
        if self._method == "inverse":
            return (linalg.damped_inverse(matrices, damping),)
        return linalg.eigendecompose(matrices)

    def _decompose_diagonal(self, key: Key, damping: float) -> Decomposition:
        diagonal = self._store.factor(key)
        if self._method == "inverse":
            return (1 / (diagonal + self._damping(key, damping).unsqueeze(-1)),)
        return (diagonal.clone(),)

    def _damping(self, key: Key, damping: float) -> Tensor:
        """What the inverse method adds to a factor, [groups] or []."""
        name, factor = key
        if not self._factored_damping:
            return self._store.weights[key].new_full((), damping)
        means = [self._store.mean_eigenvalue((name, f)) for f in FACTORS]
        return linalg.split_damping(means[0], means[1], damping)[FACTORS.index(factor)]

    def precondition(self, specs: Sequence[LayerSpec], grad: Tensor, damping: float) -> Tensor:
        """Gradients of layers of one shape, [layers groups, g_dim, a_dim]."""
        if self._method == IDENTITY:
            return grad
        a, g = self._store.stacked(specs)
        if self._method == "inverse":
            return linalg.precondition_inverse(grad, dense(a), dense(g))
        qa, qg = (d[1].to(d[0].dtype) if len(d) == 2 else None for d in (a, g))
        if specs[0].name in self._store.second_moments:
            values = stack([self._store.second_moments[s.name] for s in specs]) + damping
        else:
            values = linalg.damped_eigenvalues(a[0], g[0], damping, factored=self._factored_damping)
        return linalg.precondition_eigen(grad, qa, qg, values)


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of layers of one shape as one; no copy of one alone."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
