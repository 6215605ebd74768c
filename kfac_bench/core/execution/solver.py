"""Make decompositions of running factors, and apply them to gradients."""

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kfac_bench.core.execution import adam
from kfac_bench.core.execution.adam import AdamOptions, AdamRule
from kfac_bench.core.execution.decomposition import (
    AnyInverse,
    Decomposition,
    DiagonalEigen,
    DiagonalInverse,
    Eigen,
    FactorKey,
    Inverse,
    basis_of,
    precondition,
    values_of,
)
from kfac_bench.core.execution.store import Store, identity_like
from kfac_bench.core.kernels import linalg
from kfac_bench.core.planning.layer_spec import FACTORS, Factor, LayerSpec, side_of
from kfac_bench.core.planning.plan import IDENTITY

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FactorBatch:
    """Factors of one shape that are decomposed together, with all that the result depends on."""

    keys: tuple[FactorKey, ...]
    matrices: tuple[Tensor, ...]
    """The matrix of each factor: [groups, n, n], or a diagonal [groups, n]."""
    dampings: tuple[Tensor, ...]
    """Damping that the inverse method adds to each factor, [groups]. Empty for other methods."""
    bases: tuple[Tensor, ...]
    """The present eigenvectors of each factor, [groups, n, n], from which a QR step starts. Empty
    if eigh is due."""
    is_diagonal: bool

    def singles(self) -> Iterator["FactorBatch"]:
        """Yield a batch for each factor."""
        for i, key in enumerate(self.keys):
            part = slice(i, i + 1)
            yield replace(
                self,
                keys=(key,),
                matrices=self.matrices[part],
                dampings=self.dampings[part],
                bases=self.bases[part],
            )


class Solver:
    """The linear algebra on what a rank's ``store`` holds, by the method of the store.

    Args:
        store: What the rank holds.
        factored_damping: The option of KFAC.
        adam: The options of method eigen_adam.

    Attributes:
        adam: The same.
    """

    def __init__(
        self, store: Store, *, factored_damping: bool = False, adam: AdamRule | None = None
    ) -> None:
        self._store, self._method = store, store.method
        self._has_factored_damping = factored_damping
        self.adam = adam
        # Decompositions that failed in float32 and float64, since the start.
        self.failed = 0
        # Failures so far; also the thread of background=True counts.
        self._failures = itertools.count(1)
        # The count of the store at the last call of conditions().
        self._judged = 0

    def batch(
        self,
        members: Sequence[tuple[LayerSpec, Factor]],
        damping: float | None,
        *,
        copy: bool = False,
    ) -> FactorBatch:
        """Return running factors of one shape as a batch for :meth:`solve`.

        With ``copy`` the batch does not change when the running factors do.
        """
        keys = tuple((spec.name, factor) for spec, factor in members)
        matrices = tuple(self._store.factor(key) for key in keys)
        spec, factor = members[0]
        return FactorBatch(
            keys,
            tuple(matrix.clone() for matrix in matrices) if copy else matrices,
            tuple(
                self._damping(key, damping).expand(len(matrix))
                for key, matrix in zip(keys, matrices, strict=True)
                if self._method == "inverse"
            ),
            self._bases(keys),
            is_diagonal=spec.is_diagonal(factor),
        )

    def _bases(self, keys: Sequence[FactorKey]) -> tuple[Tensor, ...]:
        """Return the eigenvectors from which one QR step starts; nothing if eigh is due."""
        if self.adam is None or self.adam.options["decomposition"] != "qr":
            return ()
        old = [self._store.decompositions.get(key) for key in keys]
        eigen = [each for each in old if isinstance(each, Eigen)]
        return tuple(each.basis for each in eigen) if len(eigen) == len(old) else ()

    def solve(self, batch: FactorBatch) -> dict[FactorKey, Decomposition]:
        """Return decompositions by factor, without those of factors that cannot be decomposed.

        The result depends on the batch alone, so any thread may call this method.
        """
        if batch.is_diagonal:
            return dict(zip(batch.keys, self._solve_diagonal(batch), strict=True))
        try:
            made = self._solve_dense(batch)
        except linalg.DecompositionError as error:
            # One bad matrix fails its whole batch, so the members are decomposed one by one.
            if len(batch.keys) > 1:
                each = [self.solve(single) for single in batch.singles()]
                return {key: made for part in each for key, made in part.items()}
            self._warn(batch.keys[0], error)
            return {}
        return dict(zip(batch.keys, made, strict=True))

    def _warn(self, key: FactorKey, error: linalg.DecompositionError) -> None:
        """Report failures 1, 10, 100 and so on: a model may have hundreds in each interval."""
        count = next(self._failures)
        if count == 1:
            log.warning("%s of %s: %s; the last good one stays", *reversed(key), error)
        elif count == 10 ** (len(str(count)) - 1):
            log.warning("%d decompositions have failed; their last good ones stay", count)

    def _solve_dense(self, batch: FactorBatch) -> Sequence[Eigen | Inverse]:
        sizes = [len(matrix) for matrix in batch.matrices]
        stacked = stack(batch.matrices)
        if self._method == "inverse":
            inverse = linalg.damped_inverse(stacked, torch.cat(batch.dampings))
            return Inverse(inverse).split(sizes)
        if self.adam is not None:
            stacked = adam.separated(stacked)
        if batch.bases:
            return Eigen(*linalg.orthogonal_iteration(stacked, stack(batch.bases))).split(sizes)
        return Eigen(*linalg.eigendecompose(stacked)).split(sizes)

    def _solve_diagonal(self, batch: FactorBatch) -> Sequence[DiagonalEigen | DiagonalInverse]:
        if self._method == "inverse":
            return [
                DiagonalInverse(1 / (diagonal + damping.unsqueeze(-1)))
                for diagonal, damping in zip(batch.matrices, batch.dampings, strict=True)
            ]
        return [DiagonalEigen(diagonal.clone()) for diagonal in batch.matrices]

    def keep(
        self,
        members: Sequence[tuple[LayerSpec, Factor]],
        made: Mapping[FactorKey, Decomposition],
    ) -> None:
        """Store what :meth:`solve` made.

        If a factor could not be decomposed, its last decomposition stays; if it has none, the
        factor counts as the identity.
        """
        self._store.keep_decompositions(made)
        for key in ((spec.name, factor) for spec, factor in members):
            if key in made:
                continue
            self.failed += 1
            if key not in self._store.decompositions:
                self._store.keep_decompositions({key: self._identity(key)})

    def _identity(self, key: FactorKey) -> Eigen | Inverse:
        eye = identity_like(self._store.factor(key), is_diagonal=False)
        if self._method == "inverse":
            return Inverse(eye)
        return Eigen(torch.ones_like(eye[..., 0]), eye)

    def _damping(self, key: FactorKey, damping: float | None) -> Tensor:
        """Return the damping that the inverse method adds to a factor, [groups] or []."""
        name, factor = key
        if damping is None:
            # Added to both factors, these are also the two parts of a factored relative damping.
            return linalg.relative_damping(self._store.mean_eigenvalue(key))
        if not self._has_factored_damping:
            # The weight only says on which device, and of which dtype, the number must be.
            return self._store.weights[key].new_full((), damping)
        means = [self._store.mean_eigenvalue((name, side)) for side in FACTORS]
        return linalg.split_damping(means[0], means[1], damping)[FACTORS.index(side_of(factor))]

    def precondition(
        self,
        specs: Sequence[LayerSpec],
        grad: Tensor,
        damping: float | None,
        *,
        adam_options: Mapping[str, AdamOptions] | None = None,
        is_scaled: bool = False,
    ) -> Tensor:
        """Precondition gradients of layers of one shape, [layers * groups, g_dim, a_dim].

        Args:
            specs: The layers.
            grad: Their gradients.
            damping: The damping; None: relative to the mean eigenvalue of each layer.
            adam_options: By layer, for method eigen_adam.
            is_scaled: Whether there is a loss scale, so that gradients may have overflowed.
        """
        if self.adam is not None:
            return self._adam_step(specs, grad, adam_options or {}, is_scaled)
        if self._method == IDENTITY:
            return grad
        if not all(map(self._store.is_decomposed, specs)):
            if len(specs) > 1:
                parts = torch.split(grad, [spec.groups for spec in specs])
                each = zip(specs, parts, strict=True)
                return torch.cat([self.precondition([s], part, damping) for s, part in each])
            return grad
        moments = self._store.second_moments
        has_moments = specs[0].name in moments
        return precondition(
            grad,
            *self._store.stacked(specs),
            damping,
            second_moments=stack([moments[s.name] for s in specs]) if has_moments else None,
            has_factored_damping=self._has_factored_damping,
        )

    def conditions(self, specs: Sequence[LayerSpec], damping: float | None) -> dict[str, float]:
        """Return :meth:`KFAC.conditions` of the layers whose decompositions this rank keeps."""
        has_new = self._store.received > self._judged
        self._judged = self._store.received
        if not has_new or self.adam is not None or self._method == IDENTITY:
            return {}
        found: dict[str, Tensor] = {}
        for spec in filter(self._store.is_decomposed, specs):
            if self._method != "inverse":
                values = self._curvature(spec, damping)
                found[spec.name] = (values.amax((-2, -1)) / values.amin((-2, -1))).max()
            elif all((spec.name, factor) in self._store.factors for factor in spec.factors):
                a, g = (self._condition(spec, side, damping) for side in FACTORS)
                found[spec.name] = (a * g).max()
        if not found:
            return {}
        # One copy from the device for all layers. A model may be on several devices.
        device = next(iter(found.values())).device
        numbers = torch.stack([x.to(device) for x in found.values()])
        return dict(zip(found, numbers.tolist(), strict=True))

    def _curvature(self, spec: LayerSpec, damping: float | None) -> Tensor:
        """Return the eigenvalues by which :meth:`precondition` divides, [groups, g_dim, a_dim]."""
        if spec.name in self._store.second_moments:
            return linalg.damped_second_moments(self._store.second_moments[spec.name], damping)
        a, g = (values_of(self._store.decomposition_of(spec, side)) for side in FACTORS)
        return linalg.damped_eigenvalues(a, g, damping, factored=self._has_factored_damping)

    def _condition(self, spec: LayerSpec, side: Factor, damping: float | None) -> Tensor:
        """Return the condition number of a factor that was inverted with its damping, [groups]."""
        largest = []
        for factor in spec.factors_of(side):
            key = spec.name, factor
            inverse = self._store.decompositions[key]
            assert isinstance(inverse, AnyInverse)
            pair = self._store.factor(key), inverse.dense()
            is_diagonal = spec.is_diagonal(factor)
            largest.append(
                [x.amax(-1) if is_diagonal else linalg.largest_eigenvalue(x) for x in pair]
            )
        top, inverse_top = (torch.stack(each).amax(0) for each in zip(*largest, strict=True))
        return (top + self._damping(key, damping)) * inverse_top

    def _adam_step(
        self,
        specs: Sequence[LayerSpec],
        grad: Tensor,
        options: Mapping[str, AdamOptions],
        is_scaled: bool,
    ) -> Tensor:
        """Return the direction of Adam in the eigenbasis, and count the step."""
        assert self.adam is not None
        is_batch = all(map(self._store.is_decomposed, specs)) or len(specs) == 1
        moments = self._store.stacked_adam(specs, grad) if is_batch else None
        of_groups = {options.get(spec.name) for spec in specs}
        if moments is None or len(of_groups) > 1:
            parts = torch.split(grad, [spec.groups for spec in specs])
            each = zip(specs, parts, strict=True)
            return torch.cat([self._adam_step([s], part, options, is_scaled) for s, part in each])
        rule, lr, own = self.adam, 0.0, of_groups.pop()
        if own is not None:
            rule, lr = replace(rule, betas=own.betas, eps=own.eps), own.lr
        a, g = self._bases_of(specs)
        out = adam.direction(
            grad,
            a,
            g,
            moments,
            rule,
            is_orthogonalized=specs[0].is_orthogonalized,
            limit=rule.limit(lr, specs[0].fan_in),
            is_scaled=is_scaled,
        )
        for spec in specs:
            self._store.adam[spec.name].steps += 1
        return out

    def _bases_of(self, specs: Sequence[LayerSpec]) -> tuple[Tensor | None, Tensor | None]:
        """Return the eigenvectors of A and G; None stands for the identity."""
        if not self._store.is_decomposed(specs[0]):
            return None, None
        a, g = (basis_of(side) for side in self._store.stacked(specs))
        # Method eigen_adam refuses divided factors.
        assert not isinstance(a, tuple)
        assert not isinstance(g, tuple)
        return a, g


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of layers of one shape as one; a single tensor is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
