"""The end of a step: write preconditioned gradients, grafted and clipped, into ``.grad``."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kfac_bench.core.distributed.collective import Collective
from kfac_bench.core.execution.gradients import Gradients
from kfac_bench.core.kernels import linalg
from kfac_bench.core.layers.base import Layer


class WriteBack:
    """Writes the gradients of ``layers``, and keeps the metrics of the last step on the device.

    Args:
        layers: The layers that K-FAC covers.
        optimizer: Has the learning rates that the KL clip reads.
        others: Spans the ranks that hold the other layers of the model, if there are any.
        grafting: Whether to give each preconditioned gradient the norm of its gradient.

    Raises:
        ValueError: The optimizer does not hold the weights of a layer.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        optimizer: Optimizer,
        others: Collective | None,
        *,
        grafting: bool = False,
    ) -> None:
        self._layers, self._optimizer, self._others = layers, optimizer, others
        self._has_grafting = grafting
        self._group_of = _find_param_groups(layers, optimizer)
        self._nu: Tensor | None = None
        self._cosine: Tensor | None = None
        self._cosine_of: list[str] = []

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each layer's weight.

        Raises:
            ValueError: The optimizer chooses its rate itself.
        """
        groups = self._optimizer.param_groups
        rates = {name: groups[index]["lr"] for name, index in self._group_of.items()}
        if any(rate is None for rate in rates.values()):
            raise ValueError(
                f"{type(self._optimizer).__name__} has lr=None, but the KL clip needs the learning "
                "rate: give the optimizer a rate, or set kl_clip=None"
            )
        return {name: float(rate) for name, rate in rates.items()}

    def write(self, gradients: Gradients, kl_clip: float | None, *, track_cosine: bool) -> None:
        """Write preconditioned gradients into ``.grad``; no clip if ``kl_clip`` is None."""
        names = gradients.names
        scales = gradients.grafting_scales() if self._has_grafting and names else None
        self._nu = None
        if kl_clip is not None:
            # The clip judges what is written, so it sees the grafted gradients.
            self._nu = self._clip_factor(names, _scaled(gradients.dots(), scales), kl_clip)
        self._cosine_of = names if track_cosine else []
        if self._cosine_of:
            self._cosine = gradients.cosines()
        gradients.write(self._scales(scales, len(names)))

    def _scales(self, grafting: Tensor | None, count: int) -> Sequence[Tensor] | None:
        """Return what multiplies each layer, None if that is 1: grafting times the KL clip."""
        if grafting is None:
            return None if self._nu is None else [self._nu] * count
        return (grafting if self._nu is None else grafting * self._nu).unbind()

    def _clip_factor(
        self, names: Sequence[str], dots: Iterable[Tensor], kl_clip: float
    ) -> Tensor | None:
        """Return nu of eq. 16 over all layers of the model, None if backward reached none."""
        others = self._others
        if names:
            rates = self.learning_rates()
            lrs = [rates[n] for n in names]
            change = linalg.kl_clip_sum(dots, lrs)
        elif others is None:
            return None
        else:
            # Other stages of the pipeline wait for this stage's part of the sum, even for 0.
            change = torch.zeros((), device=self._layers[0].weight.device)
        if others is not None and others.world_size > 1:
            ranks = tuple(range(others.world_size))
            others.all_reduce(change, ranks, "model_parallel/clip").wait()
        return linalg.kl_clip_scale(change, kl_clip)

    def statistics(self) -> dict[str, Any]:
        """Return ``nu`` and ``cosine`` of :meth:`KFAC.statistics`, on the host."""
        cosine = [] if not self._cosine_of or self._cosine is None else self._cosine.tolist()
        return {
            "nu": None if self._nu is None else self._nu.item(),
            "cosine": dict(zip(self._cosine_of, cosine, strict=True)),
        }


def _scaled(dots: Iterable[Tensor], scales: Tensor | None) -> Iterable[Tensor]:
    if scales is None:
        return dots
    return (dot * scale for dot, scale in zip(dots, scales, strict=True))


def _find_param_groups(layers: Sequence[Layer], optimizer: Optimizer) -> dict[str, int]:
    """Return each layer's index in the optimizer's groups, which have the learning rates."""
    index = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    missing = [layer.name for layer in layers if id(layer.weight) not in index]
    if missing:
        raise ValueError(
            f"the optimizer does not hold the weights of {missing[:3]}: pass them to it, "
            "freeze them, or name them in skip"
        )
    return {layer.name: index[id(layer.weight)] for layer in layers}
