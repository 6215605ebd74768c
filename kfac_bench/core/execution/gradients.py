"""The gradients of one step, before and after preconditioning, wherever they are.

There are two kinds. :class:`WholeGradients` are complete on every rank, as DistributedDataParallel
leaves them. :class:`ShardedGradients` are in parts, as FSDP2 and tensor parallelism leave them; a
gradient is then whole on its gradient workers alone, while they work on it. The executor, its
messages and the write-back use both in the same way.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kfac_bench.core.distributed.dtensor import Part, is_sharded, lay_out_grad, local, part_of
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.layer_spec import LayerSpec


class WholeGradients:
    """Gradients that every rank holds completely.

    Attributes:
        left: The names of layers that are left to the optimizer: their gradients stay as they are.
        whole: By layer, the gradients that are whole on this rank now, [groups, g_dim, a_dim].
        preconditioned: By layer, the preconditioned gradients that are whole on this rank now.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        # A model may be on several devices. Sums over its layers are made on the first one.
        self._device = layers[0].weight.device
        self.left: set[str] = set()
        self.whole: dict[str, Tensor] = {}
        self.preconditioned: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        """The layers that backward reached, in the model's order."""
        return list(self.whole)

    def begin(self) -> None:
        """Start a step with what backward left."""
        layers = (layer for layer in self._layers if layer.name not in self.left)
        grads = {layer.name: layer.get_grad() for layer in layers}
        self.whole = {name: grad for name, grad in grads.items() if grad is not None}
        self.preconditioned = {}

    def leave(self, names: set[str]) -> None:
        """Leave layers to the optimizer, from this step on."""
        self.left |= names
        for name in names:
            self.whole.pop(name, None)

    def keep(self, specs: Sequence[LayerSpec]) -> None:
        """Note that no message needs these preconditioned gradients; they stay as they are."""

    def products(self) -> Tensor:
        """Return <p, g>, <p, p> and <g, g> of each of :attr:`names`, [names, 3].

        p is a preconditioned gradient, g the gradient.
        """
        pairs = [(self.preconditioned[n].flatten(), x.flatten()) for n, x in self.whole.items()]
        # One call for all layers takes few launches on a GPU.
        norms = torch._foreach_norm([x for pair in pairs for x in pair])
        squares = torch._foreach_mul(norms, norms)
        rows: list[Tensor] = []
        for (name, grad), (new, old), p, g in zip(
            self.whole.items(), pairs, squares[::2], squares[1::2], strict=True
        ):
            # A gradient that nothing has preconditioned has the same three numbers, bit by bit.
            # Not a sum of products, which would write a tensor of the size of the gradient.
            is_same = self.preconditioned[name] is grad
            rows += [g if is_same else torch.dot(new, old), p, g]
        return torch.stack([x.to(self._device) for x in rows]).view(-1, 3)

    def weight_squares(self) -> Tensor:
        """Return the square of the norm of the weights of each of :attr:`names`, [names]."""
        reached = [layer for layer in self._layers if layer.name in self.whole]
        # The projections of attention are parts of one weight. FSDP2 on one process has DTensors.
        weights = [local(layer.weight.detach())[layer.part] for layer in reached]
        biases = [local(x.bias.detach())[x.part] for x in reached if x.bias is not None]
        norms = torch._foreach_norm(weights + biases)
        # The square of a norm in float16 soon overflows.
        each = iter(n.to(self._device, torch.promote_types(n.dtype, torch.float32)) for n in norms)
        of_weights = torch.stack([next(each) for _ in reached]).square()
        if not biases:
            return of_weights
        zero = of_weights.new_zeros(())
        of_biases = [zero if layer.bias is None else next(each) for layer in reached]
        return of_weights + torch.stack(of_biases).square()

    def cosines(self) -> Tensor:
        """Return the cosine between both, of each of :attr:`names`."""
        flat = ((self.preconditioned[n].flatten(), x.flatten()) for n, x in self.whole.items())
        return torch.stack([cosine_similarity(new, grad, 0).to(self._device) for new, grad in flat])

    def write(
        self, scales: Sequence[Tensor] | None, of_old: Sequence[Tensor] | None = None
    ) -> None:
        """Write preconditioned gradients into ``.grad``, then forget them.

        Args:
            scales: What multiplies them, for each of :attr:`names`; None if all are 1.
            of_old: What multiplies the gradient that is added to them; None if there is none.
        """
        reached = (layer for layer in self._layers if layer.name in self.whole)
        for i, layer in enumerate(reached):
            grad = self.preconditioned[layer.name]
            scale = None if scales is None else scales[i].to(grad.device)
            old_scale = None if of_old is None else of_old[i].to(grad.device)
            if grad is self.whole[layer.name] and scale is not None and old_scale is not None:
                # Nothing has preconditioned it, and writing changes what it would be added to.
                scale, old_scale = scale + old_scale, None
            layer.set_grad(grad, scale, old_scale)
        # If they stayed until the next step, they would take the memory of two more gradients.
        self.whole, self.preconditioned = {}, {}


def any_sharded(layers: Sequence[Layer]) -> bool:
    """Return whether ranks hold parts of some layer's parameters."""
    return any(is_sharded(layer.weight) for layer in layers)


class ShardedGradients:
    """The parts of the gradients that this rank holds; see :class:`WholeGradients`.

    A gradient becomes ``whole`` on its gradient workers when their message has arrived. As soon as
    the preconditioned gradient is needed no more, only this rank's part of it is kept.
    """

    def __init__(self, layers: Sequence[Layer], world_size: int) -> None:
        self._layers = {layer.name: layer for layer in layers}
        self._params = list(unique_params(layers))
        self._parts = {id(p): part_of(p, world_size) for p in self._params}
        self.left: set[str] = set()
        self._kept: dict[str, list[Tensor]] = {}
        """This rank's parts of the preconditioned weight and bias gradients, by layer."""
        self._products = torch.empty(0)
        """[names, 4]: <p, g>, <p, p>, <g, g>, <w, w>; p is a preconditioned
        gradient, g the gradient, w the weight."""
        self.whole: dict[str, Tensor] = {}
        self.preconditioned: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Start a step with what backward left; all ranks call it."""
        self._forget()
        for param in self._params:
            lay_out_grad(param)

    def leave(self, names: set[str]) -> None:
        """Leave layers to the optimizer, from this step on."""
        self.left |= names

    def _forget(self) -> None:
        self.whole, self.preconditioned, self._kept = {}, {}, {}

    @property
    def names(self) -> list[str]:
        """The layers that backward reached, in the model's order."""
        weights = {n: x.weight for n, x in self._layers.items() if n not in self.left}
        return [n for n, w in weights.items() if w.grad is not None and w.requires_grad]

    def add_part(self, name: str, matrix: Tensor) -> None:
        """Add this rank's part to a gradient [groups, g_dim, a_dim], which is 0 before.

        Where several ranks hold one block, each adds a share of its value, so that the sum over
        ranks is right.
        """
        layer, blocks = self._layers[name], [*self._blocks(name, matrix)]
        for whole, held, part in blocks:
            if held.grad is not None:
                there, here = part.within(layer.part)
                whole[there] = local(held.grad)[here] * part.share
        weight, *bias = (whole for whole, _, _ in blocks)
        if weight.untyped_storage().data_ptr() != matrix.untyped_storage().data_ptr():
            # A grouped transposed convolution has copies here, not views of the matrix.
            matrix.copy_(layer.to_matrix(weight, bias[0] if bias else None))

    def keep(self, specs: Sequence[LayerSpec]) -> None:
        """Reduce whole preconditioned gradients to this rank's parts, which frees their memory."""
        for name in (spec.name for spec in specs):
            if name in self.preconditioned:
                self.whole.pop(name, None)
                rows, matrix = self._layers[name].part, self.preconditioned.pop(name)
                self._kept[name] = [
                    whole[part.within(rows)[0]].clone()
                    for whole, _, part in self._blocks(name, matrix)
                ]

    def sum_products(self, out: Tensor) -> None:
        """Write what this rank's parts add to the products into ``out``, [4 * layers]."""
        sums = out.zero_().view(len(self._layers), 4)
        for i, name in enumerate(self._layers):
            for new, old, weight, part in self._parts_of(name):
                old, weight = old.to(new.dtype), weight.to(new.dtype)
                products = [new * old, new.square(), old.square(), weight.square()]
                sums[i] += part.share * torch.stack([product.sum() for product in products])

    def keep_products(self, summed: Tensor) -> None:
        """Store the products, summed over ranks, [4 * layers]."""
        names = set(self.names)
        reached = [i for i, name in enumerate(self._layers) if name in names]
        self._products = summed.view(-1, 4)[reached]

    def products(self) -> Tensor:
        """Return <p, g>, <p, p> and <g, g> of each of :attr:`names`, [names, 3]."""
        return self._products[:, :3]

    def weight_squares(self) -> Tensor:
        """Return the square of the norm of the weights of each of :attr:`names`, [names]."""
        return self._products[:, 3]

    def cosines(self) -> Tensor:
        """Return the cosine between both, of each of :attr:`names`."""
        dots, new, old, _ = self._products.unbind(1)
        return dots / (new.sqrt() * old.sqrt()).clamp_min(torch.finfo(dots.dtype).tiny)

    def write(
        self, scales: Sequence[Tensor] | None, of_old: Sequence[Tensor] | None = None
    ) -> None:
        """See :meth:`WholeGradients.write`."""
        for i, name in enumerate(self.names):
            for new, old, _, _ in self._parts_of(name):
                scaled = new if scales is None else new * scales[i]
                old.copy_(scaled if of_old is None else scaled + old * of_old[i])
        self._forget()

    def _parts_of(self, name: str) -> Iterator[tuple[Tensor, Tensor, Tensor, Part]]:
        """Yield this rank's part of each parameter: preconditioned gradient, gradient, weight."""
        layer = self._layers[name]
        # Not strict: nothing is kept of a layer that backward did not reach.
        for param, new in zip(layer.params, self._kept.get(name, ()), strict=False):
            if param.grad is not None and param.requires_grad:
                part = self._parts[id(param)]
                here = part.within(layer.part)[1]
                yield new, local(param.grad)[here], local(param.detach())[here], part

    def _blocks(self, name: str, matrix: Tensor) -> Iterator[tuple[Tensor, Tensor, Part]]:
        """Yield each parameter with its block of ``matrix`` before it, and this rank's part."""
        layer = self._layers[name]
        # Not strict: from_matrix returns (weight, None) for a layer without a bias.
        for param, whole in zip(layer.params, layer.from_matrix(matrix), strict=False):
            assert whole is not None
            yield whole, param, self._parts[id(param)]


Gradients = WholeGradients | ShardedGradients


def unique_params(layers: Iterable[Layer]) -> Iterable[Tensor]:
    """Return the weights and biases of layers, each tensor once."""
    return {id(p): p for layer in layers for p in layer.params}.values()
