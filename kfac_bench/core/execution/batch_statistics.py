"""The statistics of one batch: from raw moments of this rank to the running averages."""

from collections.abc import Iterable, MutableMapping, Sequence

import torch
from torch import Tensor

from kfac_bench.core.capture.moments import Collected
from kfac_bench.core.execution.decomposition import FactorKey
from kfac_bench.core.execution.store import Store, identity_like
from kfac_bench.core.kernels.gram import Number, Scale, block_of
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.layer_spec import FACTORS, Factor, side_of

Statistics = MutableMapping[FactorKey, tuple[Tensor, Tensor]]
"""A statistic of this batch and its weight: the number of samples, a 0-d tensor."""

SecondMoments = MutableMapping[str, tuple[Tensor, Tensor]]
"""Second moments [groups, g_dim, a_dim] of this batch and their weight, by layer."""


class BatchStatistics:
    """Statistics of one batch, each with its weight: its examples, or 0 if it is unusable.

    The executor computes them, messages replace them by means over ranks, and :meth:`fold` adds
    them to the running averages.

    Attributes:
        factors: Statistics of A and G, and their weights.
        second_moments: EKFAC's second moments, and their weights.
        loss_weight: What multiplied this rank's loss beside the loss scale of all ranks. With 0
            the rank has no statistics.
    """

    def __init__(self, scale: Scale, *, of_sums: bool = False, from_identity: bool = False) -> None:
        self.factors: Statistics = {}
        self.second_moments: SecondMoments = {}
        # By device, how many statistics were left out because they were not finite, and what the
        # statistics since the last fold add to it.
        self._dropped: dict[torch.device, Tensor] = {}
        self._lost: list[Tensor] = []
        self._scale = scale
        # True if g is the gradient of a sum over examples (mc, type2), not of the user's own loss.
        self._of_sums = of_sums
        self._from_identity = from_identity
        self.loss_weight = 1.0

    def compute_factor(self, layer: Layer, factor: Factor, new: Collected | None) -> None:
        """Turn a raw moment into a statistic; ``new`` is None if the layer was not used.

        The loss scale stays in it until :meth:`fold`.
        """
        if new is None or not self.loss_weight:
            zeros = _zeros(layer.spec.factor_shape(factor), layer.weight)
            self.factors[layer.name, factor] = zeros, zeros.new_zeros(())
            return
        side, _, block = factor.partition(".")
        moment = new.a if side == "A" else new.g
        if block:
            moment = block_of(moment, layer.spec.blocks(side), int(block))
        scale = new.scales(self._scale, is_conv=layer.is_conv)[FACTORS.index(side)]
        if side == "G":
            scale = scale * self._per_example(new.all_examples)
        moment *= scale
        # A is a mean over rows, of which ranks may have unequal numbers per sample.
        weight = new.rows if side == "A" else new.weight_of_g
        self.factors[layer.name, factor] = self._only_finite(moment, weight)

    def compute_second_moment(self, layer: Layer, new: Collected | None) -> None:
        """Turn raw second moments into a statistic; ``new`` is None if the layer was not used.

        If a and g are independent, it is the product of the eigenvalues of A and G.
        """
        if new is None or new.second_moment is None or not self.loss_weight:
            zeros = _zeros(layer.spec.grad_shape, layer.weight)
            self.second_moments[layer.name] = zeros, zeros.new_zeros(())
            return
        scale_a, scale_g = new.scales(self._scale, is_conv=layer.is_conv)
        moment = new.second_moment * (scale_a * scale_g * new.rows)
        moment *= self._per_example(new.all_examples)
        self.second_moments[layer.name] = self._only_finite(moment, new.weight_of_g)

    def _only_finite(self, moment: Tensor, weight: Number) -> tuple[Tensor, Tensor]:
        """Return the statistic and its weight, zeros for one that is not finite."""
        # 0 times infinity is NaN, and NaN differs from 0. isfinite takes four launches on a GPU.
        unusable = moment.sum() * 0 != 0
        # Without samples, because a gradient was discarded, nothing is lost.
        self._lost.append(unusable & (weight > 0) if isinstance(weight, Tensor) else unusable)
        return moment.masked_fill_(unusable, 0.0), ~unusable * (1.0 * weight)

    @property
    def dropped(self) -> int:
        """Statistics left out because they were not finite. This reads from the device."""
        self._count_lost()
        return sum(int(number) for number in self._dropped.values())

    def _count_lost(self) -> None:
        for places in _alike(self._lost):
            new = torch.stack([self._lost[i] for i in places]).sum()
            old = self._dropped.get(new.device)
            self._dropped[new.device] = new if old is None else old + new
        self._lost.clear()

    def _per_example(self, examples: Number) -> Number:
        return 1 / (examples if self._of_sums else self.loss_weight) ** 2

    def fold(
        self,
        store: Store,
        layers: dict[str, Layer],
        decay: float,
        loss_scale: float | Tensor = 1.0,
    ) -> None:
        """Add the statistics f to the running averages F, and forget them.

        The averages are debiased: F_k = sum_i decay^(k-i) f_i / sum_i decay^(k-i). With
        ``factor_init="identity"`` they are F_k = decay F_(k-1) + (1 - decay) f_k. Before the first
        statistic a factor is the identity in both cases. Second moments are always debiased;
        before the first statistic they are the products of the eigenvalues.

        Args:
            store: Holds the running averages.
            layers: The layers by name.
            decay: Weight of the old average.
            loss_scale: What multiplied the loss of every rank before backward.
        """
        self._count_lost()
        weights, counts = [], []
        for key, (statistic, samples) in self.factors.items():
            if key not in store.factors:
                is_diagonal = layers[key[0]].spec.is_diagonal(key[1])
                store.keep_factor(key, identity_like(statistic, is_diagonal=is_diagonal))
                store.weights[key] = statistic.new_zeros(())
            is_scaled = side_of(key[1]) == "G"
            counts.append(_unscale(statistic, samples, loss_scale) if is_scaled else samples)
            weights.append(store.weights[key])
        shares = _shares(weights, counts, decay, from_identity=self._from_identity)
        for (key, (statistic, _)), share in zip(self.factors.items(), shares, strict=True):
            # In half precision, store.factor returns a new tensor: it must be stored again.
            store.keep_factor(key, store.factor(key).lerp_(statistic, share))
        for name, (statistic, samples) in self.second_moments.items():
            if name in store.second_moments:
                samples = _unscale(statistic, samples, loss_scale)
                (share,) = _shares([store.moment_weights[name]], [samples], decay)
                store.second_moments[name].lerp_(statistic, share)
        self.factors.clear()
        self.second_moments.clear()


def _alike(tensors: Sequence[Tensor]) -> Iterable[list[int]]:
    """Return the indices of tensors of one device and dtype: the layers of a model may differ."""
    found: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, x in enumerate(tensors):
        found.setdefault((x.device, x.dtype), []).append(i)
    return found.values()


def _shares(
    weights: Sequence[Tensor],
    samples: Sequence[Tensor],
    decay: float,
    *,
    from_identity: bool = False,
) -> list[Tensor]:
    """Add statistics to the weights of averages; return their shares of the averages.

    Those that are alike are counted together: one by one they would take many launches.
    """
    shares: dict[int, Tensor] = {}
    for places in _alike(weights):
        old = torch.stack([weights[i] for i in places])
        # torch.where in place of an if: the host does not wait for the number of samples.
        present = torch.stack([samples[i] for i in places]) > 0
        new = torch.where(present, decay * old + 1, old)
        share = present * (1 - decay) if from_identity else present / new.clamp_min(1)
        torch._foreach_copy_([weights[i] for i in places], list(new.unbind()))
        shares |= zip(places, share.to(old.dtype).unbind(), strict=True)
    return [shares[i] for i in range(len(weights))]


def _unscale(moment: Tensor, samples: Tensor, loss_scale: float | Tensor) -> Tensor:
    """Divide a moment by the square of the loss scale, in place; return its weight.

    The weight becomes 0 if the scale or its square is not finite. This happens after the messages,
    so that they can start before the scale is known.
    """
    if isinstance(loss_scale, float | int) and loss_scale == 1:
        return samples
    if isinstance(loss_scale, Tensor):
        loss_scale = loss_scale.to(moment.device)
    inverse = moment.new_ones(()) / (loss_scale * loss_scale)
    is_usable = torch.isfinite(inverse) & (inverse > 0)
    moment *= torch.where(is_usable, inverse, torch.zeros_like(inverse))
    return samples * is_usable


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return zeros on the device of ``like``, in a statistic's dtype: at least float32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    # Not like.new_zeros: a parameter may be a DTensor, statistics are plain tensors.
    return torch.zeros(shape, device=like.device, dtype=dtype)
