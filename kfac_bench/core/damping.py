"""Damping that adapts itself: Levenberg and Marquardt's rule (Martens & Grosse 2015, section 6.5).

Every ``interval`` steps the change of the loss that the step brought is compared with the change
that the quadratic model promised,

    rho = (h(w + delta) - h(w)) / (grad^T delta + 1/2 delta^T (F + damping I) delta),

F being K-FAC's own. Above 3/4 the model is better than thought and the damping shrinks by
``decay ** interval``, below 1/4 it grows by as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kfac_bench.core.distributed.collective import Collective
from kfac_bench.core.distributed.dtensor import full
from kfac_bench.core.kernels import linalg
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.layer_spec import Factor


@dataclass
class LevenbergMarquardt:
    """A damping for ``KFAC(damping=LevenbergMarquardt(...))``; see :meth:`KFAC.adapt_damping`."""

    initial: float = 1e-2
    interval: int = 5
    """Steps between changes."""
    decay: float = 0.95
    """Factor per step, in (0, 1)."""
    least: float = 1e-6
    most: float = 1e2
    value: float = field(init=False)
    rho: float = field(init=False, default=math.nan)
    """The last reduction ratio."""

    def __post_init__(self) -> None:
        self.value = self.initial
        if not 0 < self.least <= self.initial <= self.most or not 0 < self.decay < 1:
            raise ValueError(f"{self}: needs 0 < least <= initial <= most and 0 < decay < 1")
        if self.interval < 1:
            raise ValueError(f"{self}: needs interval >= 1")

    def __call__(self, step: int) -> float:
        """The damping now: a schedule whose value the training decides."""
        return self.value

    def is_due(self, step: int) -> bool:
        """Whether :meth:`update` belongs after this step."""
        return (step + 1) % self.interval == 0

    def update(self, actual: float, predicted: float) -> None:
        """From the changes of the loss, measured and predicted; both negative if all is well."""
        if actual == 0 and not predicted < 0:  # a GradScaler left the step out
            return
        self.rho = actual / predicted if predicted < 0 else -math.inf
        factor = self.decay**self.interval
        if self.rho > 0.75:
            self.value = max(self.least, self.value * factor)
        elif not self.rho >= 0.25:  # also a loss that is no number
            self.value = min(self.most, self.value / factor)


class Trial:
    """One step under test: the weights before it, and the gradients it began with."""

    def __init__(self, model: nn.Module, damping: LevenbergMarquardt) -> None:
        self._damping = damping
        params = [p for p in model.parameters() if p.grad is not None]
        self._before = [
            (p, p.detach().clone(), p.grad.clone()) for p in params if p.grad is not None
        ]

    def finish(
        self,
        loss_before: Tensor,
        loss_after: Tensor,
        layers: Sequence[Layer],
        factors: Mapping[tuple[str, Factor], Tensor],
        collective: Collective,
    ) -> None:
        """Compare the loss' change with the model's, mean over ranks, and adapt the damping.

        ``factors`` holds those of the layers whose curvature is this rank's part. What no layer
        covers has a gradient in the model, but no curvature.
        """
        moved = {p: p.detach() - before for p, before, _ in self._before}
        linear = sum(full((moved[p] * grad).sum().float()) for p, _, grad in self._before)
        square = self._curvature(moved, layers, factors)
        change = (loss_after - loss_before).detach().float()
        world = tuple(range(collective.world_size))
        figures = torch.stack([change / len(world), linear / len(world) + 0.5 * square])
        if len(world) > 1:
            collective.all_reduce(figures, world, "adapt_damping").wait()
        actual, predicted = figures.tolist()
        self._damping.update(actual, predicted)

    def _curvature(
        self,
        moved: Mapping[nn.Parameter, Tensor],
        layers: Sequence[Layer],
        factors: Mapping[tuple[str, Factor], Tensor],
    ) -> Tensor:
        """delta^T (G kron A + damping I) delta, summed over the layers."""
        grads = {p: p.grad for p in moved}
        total = torch.zeros((), device=next(iter(moved.values())).device)
        try:
            for p, delta in moved.items():
                p.grad = delta  # so that a layer brings it into its own form
            for layer in layers:
                delta_matrix = layer.get_grad()  # of a sharded layer a message: on every rank
                if delta_matrix is None or (layer.name, "A") not in factors:
                    continue
                product = linalg.precondition_inverse(
                    delta_matrix, factors[layer.name, "A"], factors[layer.name, "G"]
                )
                product = product + self._damping.value * delta_matrix
                total = total + (product * delta_matrix).sum().float()
        finally:
            for p, grad in grads.items():
                p.grad = grad
        return total
