"""Statistics of gradients that ``torch.autograd.grad`` returns and the script assigns itself."""

from typing import Any

from torch import Tensor

from kfac_bench.core.capture.moments import Collected, Forward, Moments
from kfac_bench.core.layers.base import Layer

SAME_DIRECTION = 0.9
"""Least square of the cosine between two gradients that count as one, perhaps clipped."""


class AssignedGradients:
    """Moments of passes of ``torch.autograd.grad``, which count if ``.grad`` has their gradient.

    The moments of all such passes of a step are summed, and so are their gradients. At the end of
    the step the sum of the gradients is compared with ``.grad``. The result stays on the device: if
    they differ, the moments become zero and count no samples.

    Args:
        moments: Sums the moments.
    """

    def __init__(self, moments: Moments) -> None:
        self._moments = moments
        self._sums: dict[str, tuple[Layer, Tensor]] = {}
        # Layers that get gradients by backward. Passes of torch.autograd.grad mean nothing there.
        self._ignored: set[str] = set()

    def add(self, layer: Layer, x: Any, g: Tensor, forward: Forward, **options: Any) -> None:
        """Add one call; see :meth:`Moments.add`."""
        if layer.name in self._ignored:
            return
        try:
            total, _ = layer.gradient(x, g)
        except NotImplementedError:  # a layer class of the user may have moments but no rows
            return
        self._moments.add(layer, x, g, forward, **options)
        if layer.name in self._sums:
            total += self._sums[layer.name][1]
        self._sums[layer.name] = layer, total

    def ignore(self, layer: Layer) -> None:
        """Forget a layer: a backward adds to its ``.grad``."""
        self._ignored.add(layer.name)
        if self._sums.pop(layer.name, None) is not None:
            self._moments.forget(layer.name)

    def pop(self) -> dict[str, Collected]:
        """Return the moments of layers whose ``.grad`` may have been assigned; start again."""
        for name, (layer, total) in self._sums.items():
            gradient = layer.get_grad()
            if gradient is None:
                self._moments.forget(name)
                continue
            product = (total * gradient).sum()
            bound = SAME_DIRECTION * total.square().sum() * gradient.square().sum()
            is_same = (product > 0) & (product * product >= bound)
            self._moments.forget_where(name, ~is_same)
        self._sums.clear()
        return self._moments.pop()
