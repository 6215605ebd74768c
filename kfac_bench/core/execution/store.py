"""What a rank keeps between steps: running factors, decompositions, EKFAC's second moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kfac_bench.core.execution.messages import Decomposition, Decompositions
from kfac_bench.core.kernels import linalg
from kfac_bench.core.planning.layer_spec import FACTORS, Factor, LayerSpec
from kfac_bench.core.planning.sizes import has_second_moment

Key = tuple[str, Factor]
"""A layer's name and which of its factors."""

Stored = tuple[Tensor, ...]
"""A matrix; in half precision divided by its size [groups], which follows it."""


class Store:
    """What one rank holds, by layer and factor.

    Running ``factors`` and their ``weights`` (the sum of the decayed weights of the average; 0
    before the first statistic), the ``decompositions`` of the layers that this rank is a gradient
    worker of, and with EKFAC the running ``second_moments``. With a ``state_dtype`` of two bytes,
    matrices are kept in it, each divided by its size.
    """

    def __init__(
        self, specs: Iterable[LayerSpec], method: str, state_dtype: torch.dtype = torch.float32
    ) -> None:
        self.method = method
        self.half = state_dtype if state_dtype.itemsize < 4 else None
        self.factors: dict[Key, Stored] = {}
        self.weights: dict[Key, Tensor] = {}
        self.second_moments: dict[str, Tensor] = {}
        self.decompositions: Decompositions = {}
        self._specs = {spec.name: spec for spec in specs}
        self._stacks: dict[tuple[str, ...], tuple[Decomposition, Decomposition]] = {}
        """By layers: the decompositions of a batch that is preconditioned together."""

    def clear(self) -> None:
        """Forget everything, before a state is loaded."""
        for held in (self.factors, self.weights, self.second_moments, self.decompositions):
            held.clear()
        self._stacks.clear()

    def factor(self, key: Key) -> Tensor:
        """A running factor, at least fp32; the stored one itself if it is that."""
        return dense(self.factors[key])

    def keep_factor(self, key: Key, factor: Tensor) -> None:
        """Store a running factor."""
        self.factors[key] = self._stored(factor)

    def mean_eigenvalue(self, key: Key) -> Tensor:
        """Of a running factor, [groups]."""
        matrix = self.factor(key)
        if self._specs[key[0]].diagonal(key[1]):
            return matrix.mean(-1)
        return matrix.diagonal(dim1=-2, dim2=-1).mean(-1)

    def decomposition(self, key: Key) -> list[Tensor]:
        """A decomposition at least fp32: values and vectors, or the inverse, or a diagonal."""
        parts = self.decompositions[key]
        if self.half is None or len(parts) == 1:
            return list(parts)
        if self.method == "inverse":
            return [dense(parts)]
        return [parts[0], parts[1].float()]

    def keep_decomposition(self, key: Key, parts: Sequence[Tensor]) -> None:
        """Store a decomposition: matrices in half precision, if that is asked for."""
        if self.half is None or parts[-1].ndim < 3:
            self.decompositions[key] = tuple(parts)
        elif self.method == "inverse":
            self.decompositions[key] = self._stored(parts[0])
        else:
            self.decompositions[key] = parts[0], parts[1].to(self.half)

    def keep_decompositions(self, decompositions: Mapping[Key, Sequence[Tensor]]) -> None:
        """Store new ones; second moments in the old eigenbasis are of no use now."""
        for key, parts in decompositions.items():
            self.keep_decomposition(key, parts)
        self._drop_what_followed(name for name, _ in decompositions)

    def receive(self, decompositions: Mapping[Key, Decomposition]) -> None:
        """Store what another rank sent: it is in the precision it is stored in."""
        self.decompositions.update(decompositions)
        self._drop_what_followed(name for name, _ in decompositions)

    def _drop_what_followed(self, names: Iterable[str]) -> None:
        for name in names:
            self.second_moments.pop(name, None)
            for batch in [batch for batch in self._stacks if name in batch]:
                del self._stacks[batch]
        if self.method == "ekfac":
            self.start_missing_second_moments()

    def start_missing_second_moments(self) -> None:
        """Where there is an eigenbasis: from its eigenvalues."""
        for name, spec in self._specs.items():
            a, g = (self.decompositions.get((name, f)) for f in FACTORS)
            if a is None or g is None or not has_second_moment(spec, self.method):
                continue
            if name not in self.second_moments:
                self.second_moments[name] = linalg.damped_eigenvalues(a[0], g[0], 0.0)

    def eigenbasis(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Eigenvectors of A and G of a layer whose second moments are wanted."""
        if name not in self.second_moments:
            return None
        return self.decomposition((name, "A"))[1], self.decomposition((name, "G"))[1]

    def stacked(self, specs: Sequence[LayerSpec]) -> tuple[Decomposition, Decomposition]:
        """Of A and of G of a batch, as stored; kept as one tensor each, the single ones views.

        Where there are batches a layer alone is copied, too: it may be a view of what was
        decomposed or sent together with others, all of which it would keep.
        """
        names = tuple(spec.name for spec in specs)
        if len(names) == 1 and not self._stacks:
            return self.decompositions[names[0], "A"], self.decompositions[names[0], "G"]
        if names not in self._stacks:
            self._stacks[names] = self._stack_anew(specs)
        return self._stacks[names]

    def _stack_anew(self, specs: Sequence[LayerSpec]) -> tuple[Decomposition, Decomposition]:
        made = []
        for f in FACTORS:
            each = [self.decompositions[s.name, f] for s in specs]
            stacked = tuple(torch.cat(parts) for parts in zip(*each, strict=True))
            views = zip(*(torch.split(x, [s.groups for s in specs]) for x in stacked), strict=True)
            self.decompositions.update({(s.name, f): v for s, v in zip(specs, views, strict=True)})
            made.append(stacked)
        return made[0], made[1]

    def _stored(self, matrix: Tensor) -> Stored:
        """In half precision divided by its largest element: factors are tiny, inverses huge."""
        if self.half is None or matrix.ndim < 3:
            return (matrix,)
        size = matrix.abs().amax((-2, -1)).clamp_min(torch.finfo(matrix.dtype).tiny)
        return (matrix / size[:, None, None]).to(self.half), size


def dense(stored: Stored) -> Tensor:
    """The matrix itself, at least fp32."""
    if len(stored) == 1:
        return stored[0]
    return stored[0].to(stored[1].dtype) * stored[1][:, None, None]


def identity_like(factor: Tensor, *, diagonal: bool) -> Tensor:
    """In a factor's shape."""
    if diagonal:
        return torch.ones_like(factor)
    return torch.diag_embed(torch.ones_like(factor[..., 0])).contiguous()
