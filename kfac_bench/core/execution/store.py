"""The tensors of a rank between steps: running factors, decompositions, moments of gradients."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kfac_bench.core.execution.adam import AdamMoments
from kfac_bench.core.execution.decomposition import (
    Decomposition,
    Eigen,
    FactorKey,
    ScaledMatrix,
    SideDecomposition,
    basis_of,
    cat,
    type_of,
    values_of,
)
from kfac_bench.core.kernels import linalg
from kfac_bench.core.kernels.gram import Blocks
from kfac_bench.core.planning.estimate import has_second_moment
from kfac_bench.core.planning.layer_spec import FACTORS, Factor, LayerSpec, side_of

Pair = tuple[SideDecomposition, SideDecomposition]
"""The decompositions of A and of G."""


class Store:
    """The tensors that one rank holds, by layer and factor.

    The rank holds the running ``factors`` that the plan assigns to it, with their ``weights``: the
    sum of the decayed weights in the running average, 0 before the first statistic. It holds the
    ``decompositions`` of layers that it is a gradient worker of, and with EKFAC the running
    ``second_moments``. With Adam in the eigenbasis it holds the ``adam`` moments of the layers that
    it is a gradient worker of. If ``state_dtype`` has two bytes, factors and decompositions are
    kept in it. The ``moment_weights`` are those of the second moments: 0 until one was measured.
    ``received`` counts the calls of :meth:`receive`, so it tells that decompositions have changed.
    """

    def __init__(
        self, specs: Iterable[LayerSpec], method: str, state_dtype: torch.dtype = torch.float32
    ) -> None:
        self.method = method
        self.received = 0
        self.half = state_dtype if state_dtype.itemsize < 4 else None
        self.factors: dict[FactorKey, ScaledMatrix] = {}
        self.weights: dict[FactorKey, Tensor] = {}
        self.second_moments: dict[str, Tensor] = {}
        self.moment_weights: dict[str, Tensor] = {}
        self.decompositions: dict[FactorKey, Decomposition] = {}
        self.adam: dict[str, AdamMoments] = {}
        self._specs = {spec.name: spec for spec in specs}
        # By the names of layers that are preconditioned as one batch: their stacked decompositions.
        self._stacks: dict[tuple[str, ...], Pair] = {}
        self._adam_stacks: dict[tuple[str, ...], AdamMoments] = {}
        # Bases in which moments of gradients still are, though the decompositions have changed.
        self._old_bases: dict[FactorKey, Tensor] = {}

    def clear(self) -> None:
        """Forget everything, before a state is loaded."""
        self.factors.clear()
        self.weights.clear()
        self.second_moments.clear()
        self.moment_weights.clear()
        self.decompositions.clear()
        self.adam.clear()
        self._stacks.clear()
        self._adam_stacks.clear()
        self._old_bases.clear()

    def factor(self, key: FactorKey) -> Tensor:
        """Return a running factor in at least fp32; without half precision the kept tensor."""
        return self.factors[key].dense()

    def keep_factor(self, key: FactorKey, factor: Tensor) -> None:
        """Store a running factor."""
        self.factors[key] = ScaledMatrix.keep(factor, self.half)

    def mean_eigenvalue(self, key: FactorKey) -> Tensor:
        """Return the mean eigenvalue of a running factor, [groups]: its trace over its size.

        That of a block is the one of the whole factor, of which this rank must keep all blocks.
        """
        name, side = key[0], side_of(key[1])
        spec = self._specs[name]
        if spec.is_diagonal(side):
            return self.factor(key).mean(-1)
        parts = [self.factor((name, f)).diagonal(dim1=-2, dim2=-1) for f in spec.factors_of(side)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).mean(-1)

    def load_decomposition(self, key: FactorKey, saved: Sequence[Tensor]) -> None:
        """Store a decomposition that :meth:`Decomposition.saved` returned."""
        name, factor = key
        kind = type_of(self.method, is_diagonal=self._specs[name].is_diagonal(factor))
        self.decompositions[key] = kind(*saved).compact(self.half)

    def keep_decompositions(self, decompositions: Mapping[FactorKey, Decomposition]) -> None:
        """Store decompositions that this rank made, in half precision if that is asked for."""
        self.receive({key: made.compact(self.half) for key, made in decompositions.items()})

    def receive(self, decompositions: Mapping[FactorKey, Decomposition]) -> None:
        """Store decompositions from another rank, in the precision in which they arrived."""
        self.received += 1
        for key, new in decompositions.items():
            self._note_old_basis(key, new)
        self.decompositions.update(decompositions)
        for name, _ in decompositions:
            # Stacks with the old tensors are void.
            for names in [names for names in self._stacks if name in names]:
                del self._stacks[names]
        self.start_missing_second_moments()

    def _note_old_basis(self, key: FactorKey, new: Decomposition) -> None:
        """Note that :meth:`change_bases` has work to do for a factor."""
        if key[0] not in self.adam and key[0] not in self.second_moments:
            return
        old = self.decompositions.get(key)
        if old is None:
            # Moments from before the first basis tell nothing about this one. That holds for a
            # diagonal, too: the basis of the other side counts only from now on.
            self.forget_adam(key[0])
            self.second_moments.pop(key[0], None)
        elif isinstance(old, Eigen) and isinstance(new, Eigen):
            self._old_bases.setdefault(key, old.basis)

    def change_bases(self) -> None:
        """Express moments of gradients in the bases that :meth:`receive` brought.

        Each rank decomposes its own factors first, so the ranks get A and G in different orders.
        The changes wait until both are there, and are then made in one order: otherwise the ranks
        would differ by rounding errors.
        """
        for name in dict.fromkeys(name for name, _ in self._old_bases):
            for factor in FACTORS:
                old = self._old_bases.get((name, factor))
                new = self.decompositions.get((name, factor))
                if name in self.adam and old is not None and isinstance(new, Eigen):
                    self.adam[name].change_basis(old, new.basis, is_a=factor == "A")
            if name in self.second_moments:
                self._carry_second_moments(name)
        self._old_bases.clear()

    def _carry_second_moments(self, name: str) -> None:
        """Express EKFAC's second moments in new bases; start again if none was measured."""
        spec, moments = self._specs[name], self.second_moments[name]
        for side in FACTORS:
            along, start = (-1 if side == "A" else -2), 0
            for factor in spec.factors_of(side):
                old, new = self._old_bases.get((name, factor)), self.decompositions[name, factor]
                size = new.tensors[0].shape[-1]
                if old is not None and isinstance(new, Eigen):
                    part = moments.narrow(along, start, size)
                    change = old.mT @ new.basis
                    part.copy_(linalg.change_basis_of_squares(part, change, is_a=side == "A"))
                start += size
        is_measured = self.moment_weights[name] > 0
        moments.copy_(torch.where(is_measured, moments, self._products_of_eigenvalues(spec)))

    def forget_adam(self, name: str) -> None:
        """Let Adam's moments of a layer start again."""
        self.adam.pop(name, None)
        for factor in FACTORS:
            self._old_bases.pop((name, factor), None)
        for names in [names for names in self._adam_stacks if name in names]:
            del self._adam_stacks[names]

    def stacked_adam(self, specs: Sequence[LayerSpec], grad: Tensor) -> AdamMoments | None:
        """Return Adam's moments of a batch of layers of one shape, as one.

        The moments of the single layers become views into it. None if the layers have not seen
        equally many gradients, so that there is no batch.

        Args:
            specs: The layers.
            grad: Their gradients, [layers * groups, g_dim, a_dim].
        """
        names = tuple(spec.name for spec in specs)
        groups = [spec.groups for spec in specs]
        for name, part in zip(names, torch.split(grad, groups), strict=True):
            if name not in self.adam:
                self.forget_adam(name)
                self.adam[name] = AdamMoments.start(part)
        each = [self.adam[name] for name in names]
        if len(names) == 1:
            return each[0]
        if len({moments.steps for moments in each}) > 1:
            return None
        if names not in self._adam_stacks:
            for name in names:  # another stack would keep these layers' old values
                for others in [others for others in self._adam_stacks if name in others]:
                    del self._adam_stacks[others]
            stack = AdamMoments(
                torch.cat([moments.first for moments in each]),
                torch.cat([moments.second for moments in each]),
                torch.cat([moments.skipped for moments in each]),
            )
            parts = (stack.first, stack.second, stack.skipped)
            views = zip(*(torch.split(x, groups) for x in parts), strict=True)
            for moments, (first, second, skipped) in zip(each, views, strict=True):
                moments.first, moments.second, moments.skipped = first, second, skipped
            self._adam_stacks[names] = stack
        stack = self._adam_stacks[names]
        stack.steps = each[0].steps
        return stack

    def start_missing_second_moments(self) -> None:
        """Start EKFAC's second moments from the eigenvalues, where there is an eigenbasis."""
        for name, spec in self._specs.items():
            if not has_second_moment(spec, self.method) or name in self.second_moments:
                continue
            if self.is_decomposed(spec):
                self.second_moments[name] = self._products_of_eigenvalues(spec)
                self.moment_weights[name] = self.second_moments[name].new_zeros(())

    def _products_of_eigenvalues(self, spec: LayerSpec) -> Tensor:
        """Return the second moments that gradients have if a and g are independent."""
        a, g = (values_of(self.decomposition_of(spec, side)) for side in FACTORS)
        return linalg.damped_eigenvalues(a, g, 0.0)

    def is_decomposed(self, spec: LayerSpec) -> bool:
        """Return whether there are decompositions of A and of G."""
        return all((spec.name, factor) in self.decompositions for factor in spec.factors)

    def decomposition_of(self, spec: LayerSpec, side: Factor) -> SideDecomposition:
        """Return the decomposition of A or of G, or those of all its blocks."""
        blocks = tuple(self.decompositions[spec.name, f] for f in spec.factors_of(side))
        return blocks if len(blocks) > 1 else blocks[0]

    def eigenbasis(self, name: str) -> tuple[Tensor | Blocks, Tensor | Blocks] | None:
        """Return the eigenvectors of A and G, or None if the layer has no second moments."""
        if name not in self.second_moments:
            return None
        a, g = (basis_of(self.decomposition_of(self._specs[name], side)) for side in FACTORS)
        assert a is not None
        assert g is not None
        return a, g

    def stacked(self, specs: Sequence[LayerSpec]) -> Pair:
        """Return the decompositions of a batch of layers of one shape, each as one tensor.

        The stack is kept until one of its layers is decomposed again, or is in another stack. The
        decompositions of the single layers become views into it.
        """
        names = tuple(spec.name for spec in specs)
        if len(names) == 1 and not self._stacks:
            return self.decomposition_of(specs[0], "A"), self.decomposition_of(specs[0], "G")
        # If there are batches, a single layer is copied as well: it may be a view of what was
        # decomposed or sent together with others, and would keep all of their memory.
        if names not in self._stacks:
            # A step may leave out layers. A stack for each choice of layers would fill the memory.
            for others in [others for others in self._stacks if not set(names).isdisjoint(others)]:
                del self._stacks[others]
            a, g = (self._stack(specs, side) for side in FACTORS)
            self._stacks[names] = a, g
        return self._stacks[names]

    def _stack(self, specs: Sequence[LayerSpec], side: Factor) -> SideDecomposition:
        blocks = []
        for factor in specs[0].factors_of(side):
            keys = [(spec.name, factor) for spec in specs]
            stacked = cat([self.decompositions[key] for key in keys])
            views = stacked.split([spec.groups for spec in specs])
            self.decompositions.update(zip(keys, views, strict=True))
            blocks.append(stacked)
        return tuple(blocks) if len(blocks) > 1 else blocks[0]


def identity_like(factor: Tensor, *, is_diagonal: bool) -> Tensor:
    """Return the identity in the shape of a factor, [groups, n, n] or [groups, n]."""
    if is_diagonal:
        return torch.ones_like(factor)
    return torch.diag_embed(torch.ones_like(factor[..., 0])).contiguous()
