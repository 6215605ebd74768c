"""The end of a step: preconditioned gradients, scaled by the KL clip of eq. 16, into ``.grad``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from torch.optim import Optimizer

from kfac_bench.core.distributed.collective import Collective
from kfac_bench.core.execution.sharded_gradients import Shards
from kfac_bench.core.kernels import linalg
from kfac_bench.core.layers.base import Layer


class WriteBack:
    """Writes the gradients of ``layers``, and keeps figures of the last time on the device.

    ``others`` spans the ranks that hold the other layers of the model, if there are any. Raises
    ``ValueError`` if the optimizer, which has the learning rates, does not know a layer.
    """

    def __init__(
        self, layers: Sequence[Layer], optimizer: Optimizer, others: Collective | None
    ) -> None:
        self._layers, self._optimizer, self._others = layers, optimizer, others
        self._group_of = _find_param_groups(layers, optimizer)
        self._nu: Tensor | None = None
        self._cosine: Tensor | None = None
        self._cosine_of: list[str] = []

    def write(
        self,
        grads: Mapping[str, Tensor],
        new: Mapping[str, Tensor],
        shards: Shards | None,
        kl_clip: float | None,
        *,
        track_cosine: bool,
    ) -> None:
        """``new`` for ``grads``, by layer; where ranks hold parts, both are in ``shards``."""
        names = list(grads) if shards is None else shards.names
        self._nu = None
        if kl_clip is not None:
            dots: Iterable[Tensor] = ((new[n] * grads[n]).sum() for n in names)
            if shards is not None:
                dots = shards.products[:, 0]
            self._nu = self._clip_factor(names, dots, kl_clip)
        self._cosine_of = names if track_cosine else []
        if track_cosine and names:
            if shards is not None:
                self._cosine = shards.cosines()
            else:
                each = [cosine_similarity(new[n].flatten(), grads[n].flatten(), 0) for n in names]
                self._cosine = torch.stack(each)
        if shards is not None:
            shards.write(self._nu)
            return
        for layer in self._layers:
            if layer.name in grads:
                grad = new[layer.name]
                layer.set_grad(grad if self._nu is None else grad * self._nu)

    def _clip_factor(
        self, names: Sequence[str], dots: Iterable[Tensor], kl_clip: float
    ) -> Tensor | None:
        """Of eq. 16, over all layers of the model; None if backward reached none."""
        groups, others = self._optimizer.param_groups, self._others
        if names:
            lrs = [float(groups[self._group_of[n]]["lr"]) for n in names]
            change = linalg.kl_clip_sum(dots, lrs)
        elif others is None:
            return None
        else:
            change = torch.zeros((), device=self._layers[0].weight.device)
        if others is not None and others.world_size > 1:
            ranks = tuple(range(others.world_size))
            others.all_reduce(change, ranks, "model_parallel/clip").wait()
        return linalg.kl_clip_scale(change, kl_clip)

    def statistics(self) -> dict[str, Any]:
        """``nu`` and ``cosine`` of :meth:`KFAC.statistics`, on the host."""
        cosine = [] if not self._cosine_of or self._cosine is None else self._cosine.tolist()
        return {
            "nu": None if self._nu is None else self._nu.item(),
            "cosine": dict(zip(self._cosine_of, cosine, strict=True)),
        }


def _find_param_groups(layers: Sequence[Layer], optimizer: Optimizer) -> dict[str, int]:
    """Index of the optimizer's parameter group, and so the learning rate, of each layer."""
    index = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    missing = [layer.name for layer in layers if id(layer.weight) not in index]
    if missing:
        raise ValueError(
            f"the optimizer does not hold the weights of {missing[:3]}: pass them to it, "
            "freeze them, or name them in skip"
        )
    return {layer.name: index[id(layer.weight)] for layer in layers}
