"""The statistics of one step: from raw moments of this rank to the running averages."""

from __future__ import annotations

import torch
from torch import Tensor

from kfac_bench.core.capture.moments import Collected
from kfac_bench.core.execution.messages import SecondMoments, Statistics
from kfac_bench.core.execution.store import Store, identity_like
from kfac_bench.core.kernels.conventions import Scale
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.layer_spec import FACTORS, Factor


class BatchStatistics:
    """Statistics with their weights, the samples they stand for; 0 where one is unusable.

    Messages add them up over ranks between ``compute_...`` and :meth:`fold`.
    """

    def __init__(self, scale: Scale, *, of_sums: bool = False) -> None:
        self.factors: Statistics = {}
        self.second_moments: SecondMoments = {}
        self.dropped: Tensor | None = None
        """Statistics left out because they were not finite; a 0-d tensor on the device."""
        self._scale = scale
        self._of_sums = of_sums
        """Whether g is of a loss that is a sum over samples, not of the user's own loss."""
        self.loss_weight = 1.0
        """What multiplied this rank's own loss, beside the loss scale, which is that of all."""

    def compute_factor(self, layer: Layer, factor: Factor, new: Collected | None) -> None:
        """Scale a raw moment, but for the loss scale; ``new`` is None if the layer was not used."""
        if new is None:
            zeros = _zeros(layer.spec.factor_shape(factor), layer.weight)
            self.factors[layer.name, factor] = zeros, zeros.new_zeros(())
            return
        moment = new.a if factor == "A" else new.g
        scales = new.scales(self._scale, is_conv=layer.is_conv)
        moment *= scales[FACTORS.index(factor)]
        if factor == "G":
            moment *= self._per_sample(new.samples)
        self.factors[layer.name, factor] = self._only_finite(moment, new.samples)

    def compute_second_moment(self, layer: Layer, new: Collected | None) -> None:
        """Scaled to be the product of A's and G's eigenvalues if a and g are independent."""
        if new is None or new.second_moment is None:
            zeros = _zeros(layer.spec.grad_shape, layer.weight)
            self.second_moments[layer.name] = zeros, zeros.new_zeros(())
            return
        scale_a, scale_g = new.scales(self._scale, is_conv=layer.is_conv)
        moment = new.second_moment * (scale_a * scale_g * new.rows)
        moment *= self._per_sample(new.samples)
        self.second_moments[layer.name] = self._only_finite(moment, new.samples)

    def _only_finite(self, moment: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        """The statistic and its weight; what is not finite must never enter an average."""
        finite = torch.isfinite(moment.sum())
        self.dropped = ~finite + (0 if self.dropped is None else self.dropped)
        return moment.masked_fill_(~finite, 0.0), finite * float(samples)

    def _per_sample(self, samples: int) -> float:
        return 1 / (samples if self._of_sums else self.loss_weight) ** 2

    def fold(
        self,
        store: Store,
        layers: dict[str, Layer],
        decay: float,
        loss_scale: float | Tensor = 1.0,
    ) -> None:
        """Debiased running averages: F_k = sum decay^(k-i) f_i / sum decay^(k-i).

        Before the first statistic a factor is the identity. Second moments start anew with each
        eigenbasis, from the eigenvalues, which count as one statistic. ``loss_scale`` is what
        multiplied the loss of every rank before backward.
        """
        for key, (fresh, samples) in self.factors.items():
            if key[1] == "G":
                samples = _unscale(fresh, samples, loss_scale)
            if key not in store.factors:
                diagonal = layers[key[0]].spec.diagonal(key[1])
                store.keep_factor(key, identity_like(fresh, diagonal=diagonal))
                store.weights[key] = fresh.new_zeros(())
            weight, present = store.weights[key], samples > 0
            weight.copy_(torch.where(present, decay * weight + 1, weight))
            store.keep_factor(key, store.factor(key).lerp_(fresh, present / weight.clamp_min(1)))
        for name, (fresh, samples) in self.second_moments.items():
            if name in store.second_moments:
                samples = _unscale(fresh, samples, loss_scale)
                store.second_moments[name].lerp_(fresh, (samples > 0) * (1 - decay))
        self.factors.clear()
        self.second_moments.clear()


def _unscale(moment: Tensor, samples: Tensor, loss_scale: float | Tensor) -> Tensor:
    """Divide by the square of the loss scale, in place; the weight, 0 if that is no number.

    After the messages, so that these may start before it is known.
    """
    if isinstance(loss_scale, float | int) and loss_scale == 1:
        return samples
    inverse = moment.new_ones(()) / (loss_scale * loss_scale)
    finite = torch.isfinite(inverse)
    moment *= torch.where(finite, inverse, torch.zeros_like(inverse))
    return samples * finite


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Of a statistic's dtype: at least float32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(shape, device=like.device, dtype=dtype)  # not like's: it may be a DTensor
