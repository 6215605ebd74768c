"""The gradients of one step, before and after preconditioning, wherever they are.

There are two kinds. :class:`WholeGradients` are complete on every rank, as DistributedDataParallel
leaves them. ``ShardedGradients`` (``sharded_gradients.py``) are in parts, as FSDP2 and tensor
parallelism leave them; a gradient is then whole on its gradient workers alone, while they work on
it. The executor, its messages and the write-back use both in the same way.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kfac_bench.core.execution.sharded_gradients import ShardedGradients, unique_params
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.layer_spec import LayerSpec


class WholeGradients:
    """Gradients that every rank holds completely.

    Attributes:
        whole: By layer, the gradients that are whole on this rank now, [groups, g_dim, a_dim].
        preconditioned: By layer, the preconditioned gradients that are whole on this rank now.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        # A model may be on several devices. Sums over its layers are made on the first one.
        self._device = layers[0].weight.device
        self.whole: dict[str, Tensor] = {}
        self.preconditioned: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        """The layers that backward reached, in the model's order."""
        return list(self.whole)

    def begin(self) -> None:
        """Start a step with what backward left."""
        grads = {layer.name: layer.get_grad() for layer in self._layers}
        self.whole = {name: grad for name, grad in grads.items() if grad is not None}
        self.preconditioned = {}

    def keep(self, specs: Sequence[LayerSpec]) -> None:
        """Note that no message needs these preconditioned gradients; they stay as they are."""

    def products(self) -> Tensor:
        """Return <p, g>, <p, p> and <g, g> of each of :attr:`names`, [names, 3].

        p is a preconditioned gradient, g the gradient.
        """
        rows = []
        for name, grad in self.whole.items():
            # Not sums of products: those would write two tensors of the size of the gradient.
            new, old = self.preconditioned[name].flatten(), grad.flatten()
            products = torch.dot(new, old), torch.dot(new, new), torch.dot(old, old)
            rows.append(torch.stack(products).to(self._device))
        return torch.stack(rows)

    def weight_square(self) -> Tensor:
        """Return the square of the norm of all weights whose gradients are :attr:`names`."""
        reached = (layer for layer in self._layers if layer.name in self.whole)
        # Layers may share a tensor: the projections of attention are parts of one weight.
        norms = torch._foreach_norm(list(unique_params(reached)))
        # The square of a norm in float16 soon overflows.
        wide = [n.to(self._device, torch.promote_types(n.dtype, torch.float32)) for n in norms]
        return torch.stack(wide).square().sum()

    def cosines(self) -> Tensor:
        """Return the cosine between both, of each of :attr:`names`."""
        flat = ((self.preconditioned[n].flatten(), x.flatten()) for n, x in self.whole.items())
        return torch.stack([cosine_similarity(new, grad, 0).to(self._device) for new, grad in flat])

    def write(self, scales: Sequence[Tensor] | None) -> None:
        """Write preconditioned gradients into ``.grad``, then forget them.

        ``scales`` are factors for each of :attr:`names`, None if all are 1.
        """
        reached = (layer for layer in self._layers if layer.name in self.whole)
        for i, layer in enumerate(reached):
            grad = self.preconditioned[layer.name]
            layer.set_grad(grad, None if scales is None else scales[i].to(grad.device))
        # If they stayed until the next step, they would take the memory of two more gradients.
        self.whole, self.preconditioned = {}, {}


Gradients = WholeGradients | ShardedGradients
