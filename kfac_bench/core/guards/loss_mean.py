"""Notices a cross entropy that is a sum over the examples instead of a mean."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kfac_bench.core.capture.moments import Collected
from kfac_bench.core.guards.notices import Notices

IS_ZERO = 1e-3
"""Share of a sum of squares below which a sum is zero, up to rounding in bfloat16."""


class MeanCheck:
    """Looks at the output gradients of the head, the layer that backward reaches first.

    Under a softmax cross entropy they are w (p - y), which sums to zero over the classes: no other
    usual loss has this mark. The mean over N examples has w = 1/N. For *any* weighted mean, the
    mean over the positions of the squared norm of N w (p - y) is at most 2 N. For a sum it is up to
    2 N^2, about N^2 in a new model.
    """

    def __init__(self) -> None:
        self._is_done = False
        self._evidence: Tensor | None = None
        self._samples: float = 0

    def see(self, collected: Mapping[str, Collected], loss_scale: float | Tensor) -> None:
        """Look at the statistics of a step, of which ``loss_scale`` is still a factor."""
        head = next(iter(collected.values()), None)
        if self._is_done or head is None or head.g.ndim != 3 or len(head.g) != 1:
            return
        if isinstance(head.samples, Tensor):  # a pass was discarded: another step will tell
            return
        g, self._samples = head.g[0], head.samples
        squares = g.diagonal().sum()
        if isinstance(loss_scale, Tensor):
            loss_scale = loss_scale.to(g.device)
        norm = squares * (self._samples**2 / head.rows) / (loss_scale * loss_scale)
        self._evidence = torch.stack([g.sum() / squares, norm])

    def judge(self, notices: Notices) -> None:
        """Warn if the loss cannot be a mean. This reads from the device."""
        if self._evidence is None or self._is_done:
            return
        sums, square = self._evidence.tolist()
        self._evidence = None
        if not math.isfinite(square) or not math.isfinite(sums):
            return  # an overflow: another step will tell
        self._is_done = True
        if abs(sums) < IS_ZERO and square > 2.1 * self._samples:
            notices.give(
                "mean",
                f"the loss is about {math.sqrt(square):.0f} times too large for a mean over the "
                f"{self._samples} examples of this step. Use the mean, not the sum, over the "
                "examples (with gradient accumulation: over all micro-batches), and tell K-FAC the "
                "loss scale if there is one",
            )

    def stop(self) -> None:
        """Do not look any more: a loss scale explains the size."""
        self._is_done = True
