"""The statistics of one step: from raw moments of this rank to the running averages."""

from __future__ import annotations

import torch
from torch import Tensor

from kfac_bench.core.factors import Scale
from kfac_bench.core.layer import Layer
from kfac_bench.core.messages import SecondMoments, Statistics
from kfac_bench.core.moments import Collected
from kfac_bench.core.plan import FACTORS, Factor
from kfac_bench.core.store import Store, identity_like


class Fresh:
    """Statistics with their weights, the samples they stand for; 0 where one is unusable.

    Messages add them up over ranks between ``compute_...`` and :meth:`fold`.
    """

    def __init__(self, scale: Scale) -> None:
        self.factors: Statistics = {}
        self.second_moments: SecondMoments = {}
        self.dropped: Tensor | None = None
        """Statistics left out because they were not finite; a 0-d tensor on the device."""
        self._scale = scale

    def compute_factor(
        self,
        layer: Layer,
        factor: Factor,
        new: Collected | None,
        loss_scale: float | Tensor | None,
    ) -> None:
        """Scale a raw moment; ``new`` is None if this rank did not use the layer."""
        if new is None:
            zeros = _zeros(layer.spec.factor_shape(factor), layer.weight)
            self.factors[layer.name, factor] = zeros, zeros.new_zeros(())
            return
        moment = new.a if factor == "A" else new.g
        scales = self._scale(new.samples, new.rows / new.samples, layer.is_conv)
        moment *= scales[FACTORS.index(factor)]
        if factor == "G":
            moment *= _square_of_inverse(loss_scale, new.samples)
        self.factors[layer.name, factor] = self._only_finite(moment, new.samples)

    def compute_second_moment(
        self, layer: Layer, new: Collected | None, loss_scale: float | Tensor | None
    ) -> None:
        """Scaled to be the product of A's and G's eigenvalues if a and g are independent."""
        if new is None or new.second_moment is None:
            zeros = _zeros(layer.spec.grad_shape, layer.weight)
            self.second_moments[layer.name] = zeros, zeros.new_zeros(())
            return
        scale_a, scale_g = self._scale(new.samples, new.rows / new.samples, layer.is_conv)
        moment = new.second_moment * (scale_a * scale_g * new.rows)
        moment *= _square_of_inverse(loss_scale, new.samples)
        self.second_moments[layer.name] = self._only_finite(moment, new.samples)

    def _only_finite(self, moment: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        """The statistic and its weight; what is not finite must never enter an average."""
        finite = torch.isfinite(moment.sum())
        self.dropped = ~finite + (0 if self.dropped is None else self.dropped)
        return moment.masked_fill_(~finite, 0.0), finite * float(samples)

    def fold(self, store: Store, layers: dict[str, Layer], decay: float) -> None:
        """Debiased running averages: F_k = sum decay^(k-i) f_i / sum decay^(k-i).

        Before the first statistic a factor is the identity. Second moments start anew with each
        eigenbasis, from the eigenvalues, which count as one statistic.
        """
        for key, (fresh, samples) in self.factors.items():
            if key not in store.factors:
                diagonal = layers[key[0]].spec.diagonal(key[1])
                store.keep_factor(key, identity_like(fresh, diagonal=diagonal))
                store.weights[key] = fresh.new_zeros(())
            weight, present = store.weights[key], samples > 0
            weight.copy_(torch.where(present, decay * weight + 1, weight))
            store.keep_factor(key, store.factor(key).lerp_(fresh, present / weight.clamp_min(1)))
        for name, (fresh, samples) in self.second_moments.items():
            if name in store.second_moments:
                store.second_moments[name].lerp_(fresh, (samples > 0) * (1 - decay))
        self.factors.clear()
        self.second_moments.clear()


def _square_of_inverse(loss_scale: float | Tensor | None, samples: int) -> float | Tensor:
    scale = samples if loss_scale is None else loss_scale
    return 1 / (scale * scale)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Of a statistic's dtype: at least float32."""
    return like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32))
