"""Damping that adapts itself by the rule of Levenberg and Marquardt.

See Martens & Grosse 2015, section 6.5. Every ``interval`` steps, the measured change of the loss is
compared with the change that the quadratic model predicts:

    rho = (h(w + delta) - h(w)) / (grad^T delta + 1/2 delta^T (F + damping I) delta)

F is the Fisher matrix of K-FAC. If rho is above 3/4, the model is good and the damping is
multiplied by ``decay ** interval``. If rho is below 1/4, the damping is divided by it.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kfac_bench.core.distributed.collective import Collective
from kfac_bench.core.distributed.dtensor import full
from kfac_bench.core.kernels import linalg
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.layer_spec import FACTORS, Factor
from kfac_bench.core.schedule import Schedule


@dataclass
class LevenbergMarquardt:
    """A damping for ``KFAC(damping=LevenbergMarquardt(...))``.

    Call :meth:`KFAC.adapt_damping` after each ``optimizer.step``. A clip of the gradients belongs
    after K-FAC: before it, the clip makes the predicted change too small, and the damping falls to
    ``least``. The rule is that of Martens &
    Grosse 2015, section 6.5. With the ratio rho of the measured and the predicted change of the
    loss, the damping is multiplied by ``decay ** interval`` if rho is above 3/4, and divided by it
    if rho is below 1/4.

    Each KFAC adapts a copy of its own, which begins with ``initial``: see :attr:`KFAC.damping`.

    Raises:
        ValueError: An option is out of range.
    """

    initial: float = 1e-2
    """Damping of the first step."""
    interval: int = 5
    """Steps between two changes of the damping."""
    decay: float = 0.95
    """Factor per step by which the damping changes, in (0, 1)."""
    least: float = 1e-6
    """Smallest damping."""
    most: float = 1e2
    """Largest damping."""
    terms: int = 1
    """Terms of each example that the loss is a mean over, such as tokens. Then K-FAC's F is
    1/``terms`` of the Gauss-Newton matrix, and the quadratic model multiplies F by ``terms``."""
    value: float = field(init=False)
    """The damping now."""
    rho: float = field(init=False, default=math.nan)
    """The last ratio of measured and predicted change of the loss; NaN before the first one."""

    def __post_init__(self) -> None:
        self.value = self.initial
        if not 0 < self.least <= self.initial <= self.most or not 0 < self.decay < 1:
            raise ValueError(f"{self}: needs 0 < least <= initial <= most and 0 < decay < 1")
        if self.interval < 1:
            raise ValueError(f"{self}: needs interval >= 1")
        if self.terms < 1:
            raise ValueError(f"{self}: needs terms >= 1")

    def __call__(self, step: int) -> float:
        """Return the damping now, as a schedule does."""
        return self.value

    def is_due(self, step: int) -> bool:
        """Return whether :meth:`update` is called after this step."""
        return (step + 1) % self.interval == 0

    def update(self, actual: float, predicted: float) -> None:
        """Change the damping after one step.

        Args:
            actual: Measured change of the loss; negative if the step was good.
            predicted: Change of the loss by the quadratic model; negative if the model is sound.
                Otherwise the damping grows.
        """
        # Nothing changed and nothing was predicted: a GradScaler skipped the step.
        if actual == 0 and not predicted < 0:
            return
        self.rho = actual / predicted if predicted < 0 else -math.inf
        # The power of a long interval is 0 in floating point, by which nothing can be divided.
        factor = max(self.decay**self.interval, sys.float_info.min)
        if self.rho > 0.75:
            self.value = max(self.least, self.value * factor)
        # Written with "not", so that a rho of NaN also makes the damping grow.
        elif not self.rho >= 0.25:
            self.value = min(self.most, self.value / factor)


class Trial:
    """A step that the adaptive damping judges: weights and gradients before the step."""

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
        """Compare the change of the loss with the quadratic model, and adapt the damping.

        Both are means over ranks. Parameters outside all layers count with their gradient, but
        without curvature.

        Args:
            loss_before: This rank's loss before the step.
            loss_after: This rank's loss after the step, on the same batch.
            layers: All covered layers.
            factors: A and G of the layers whose curvature this rank computes.
            collective: The ranks.
        """
        moved = {p: p.detach() - before for p, before, _ in self._before}
        square = self._curvature(moved, layers, factors)
        linear = sum(
            full((moved[p] * grad).sum().float()).to(square.device) for p, _, grad in self._before
        )
        change = (loss_after - loss_before).detach().float().to(square.device)
        world = tuple(range(collective.world_size))
        metrics = torch.stack([change / len(world), linear / len(world) + 0.5 * square])
        if len(world) > 1:
            collective.all_reduce(metrics, world, "adapt_damping").wait()
        actual, predicted = metrics.tolist()
        self._damping.update(actual, predicted)

    def _curvature(
        self,
        moved: Mapping[nn.Parameter, Tensor],
        layers: Sequence[Layer],
        factors: Mapping[tuple[str, Factor], Tensor],
    ) -> Tensor:
        """Return delta^T (terms G kron A + damping I) delta, summed over the layers."""
        grads = {p: p.grad for p in moved}
        total = torch.zeros((), device=layers[0].weight.device)
        try:
            for p, delta in moved.items():
                # Layers turn .grad into a matrix, so delta poses as the gradient for a moment.
                p.grad = delta
            for layer in layers:
                # All ranks call get_grad(): it sends a message if ranks hold parts.
                delta_matrix = layer.get_grad()
                if delta_matrix is None or (layer.name, layer.spec.factors[0]) not in factors:
                    continue
                a, g = (
                    tuple(factors[layer.name, f] for f in layer.spec.factors_of(side))
                    for side in FACTORS
                )
                product = linalg.precondition_inverse(
                    delta_matrix, a if len(a) > 1 else a[0], g if len(g) > 1 else g[0]
                )
                product = self._damping.terms * product + self._damping.value * delta_matrix
                total = total + (product * delta_matrix).sum().float().to(total.device)
        finally:
            for p, grad in grads.items():
                p.grad = grad
        return total


def adaptive(damping: Schedule | None) -> LevenbergMarquardt | None:
    """Return the damping if it adapts itself."""
    return damping if isinstance(damping, LevenbergMarquardt) else None
