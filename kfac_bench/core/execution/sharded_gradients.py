"""Gradients of which each rank holds a part: into the plan's messages, and back out of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kfac_bench.core.distributed.dtensor import Part, is_sharded, lay_out_grad, local, part_of
from kfac_bench.core.layers.base import Layer


def any_sharded(layers: Sequence[Layer]) -> bool:
    """Whether ranks hold parts of some layer's parameters."""
    return any(is_sharded(layer.weight) for layer in layers)


class Shards:
    """The rank's parts of the gradients of ``layers``, before and after preconditioning.

    A gradient is whole on its gradient workers alone, for as long as they work on it.
    """

    def __init__(self, layers: Sequence[Layer], world_size: int) -> None:
        self._layers = {layer.name: layer for layer in layers}
        params = {id(p): p for layer in layers for p in _params(layer)}
        self._parts = {i: part_of(p, world_size) for i, p in params.items()}
        self._params = list(params.values())
        self._new: dict[str, list[Tensor]] = {}
        self.products = torch.empty(0)
        """By layer of :meth:`names`: <p, g>, <p, p>, <g, g>; p is the preconditioned g."""

    def begin(self) -> None:
        """A new step; all ranks call it."""
        self._new.clear()
        for param in self._params:
            lay_out_grad(param)

    @property
    def names(self) -> list[str]:
        """Layers that backward reached."""
        return [n for n, layer in self._layers.items() if layer.weight.grad is not None]

    def give(self, name: str, matrix: Tensor) -> None:
        """Add this rank's share to a gradient [groups, g_dim, a_dim], which is 0 before.

        Where several ranks hold one block, each adds a part of its value.
        """
        for whole, held, part in self._blocks(name, matrix):
            assert whole.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()
            if held.grad is not None:
                there, here = part.within(self._layers[name].part)
                whole[there] = local(held.grad)[here] * part.share

    def take(self, name: str, matrix: Tensor) -> None:
        """Keep this rank's part of a preconditioned gradient [groups, g_dim, a_dim]."""
        rows = self._layers[name].part
        self._new[name] = [
            whole[part.within(rows)[0]].clone() for whole, _, part in self._blocks(name, matrix)
        ]

    def sum_products(self, out: Tensor) -> None:
        """Write the rank's share of :attr:`products` into ``out`` [3 layers]; else 0."""
        sums = out.zero_().view(len(self._layers), 3)
        for i, name in enumerate(self._layers):
            for new, old, part in self._pairs(name):
                old = old.to(new.dtype)
                sums[i] += part.share * torch.stack(
                    [(new * old).sum(), new.square().sum(), old.square().sum()]
                )

    def keep_products(self, summed: Tensor) -> None:
        """Of all ranks."""
        reached = [i for i, x in enumerate(self._layers.values()) if x.weight.grad is not None]
        self.products = summed.view(-1, 3)[reached]

    def cosines(self) -> Tensor:
        """Between gradient and preconditioned one, by layer of :attr:`names`."""
        dots, *squares = self.products.unbind(1)
        return dots / (squares[0] * squares[1]).sqrt().clamp_min(1e-8)

    def write(self, scale: Tensor | None) -> None:
        """Preconditioned gradients, times ``scale``, into the parameters' gradients, in place."""
        for name in self.names:
            for new, old, _ in self._pairs(name):
                old.copy_(new if scale is None else new * scale)
        self._new.clear()

    def _pairs(self, name: str) -> Iterator[tuple[Tensor, Tensor, Part]]:
        """Preconditioned and own gradient of each parameter, this rank's parts."""
        layer = self._layers[name]
        for param, new in zip(_params(layer), self._new.get(name, ()), strict=False):
            if param.grad is not None:
                part = self._parts[id(param)]
                yield new, local(param.grad)[part.within(layer.part)[1]], part

    def _blocks(self, name: str, matrix: Tensor) -> Iterator[tuple[Tensor, Tensor, Part]]:
        """Of each parameter: its rows of ``matrix``, itself, this rank's part of it."""
        layer = self._layers[name]
        for param, whole in zip(_params(layer), layer.from_matrix(matrix), strict=False):
            assert whole is not None
            yield whole, param, self._parts[id(param)]


def _params(layer: Layer) -> list[Tensor]:
    return [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
