"""Sums of raw moments over the calls, positions and micro-batches of a step.

A raw moment is a sum of a a^T or g g^T without any scale. :class:`Collected` holds the counts that
a convention needs to scale them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kfac_bench.core.capture.calls import Family
from kfac_bench.core.kernels.gram import (
    Blocks,
    Number,
    Scale,
    at_least_float32,
    flat_blocks,
    without_autocast,
)
from kfac_bench.core.layers.base import Layer

Forward = tuple[int, int]
"""The numbers of a forward and of a backward."""

Counts = dict[Forward, Number]

Eigenbasis = Callable[[str], tuple[Tensor | Blocks, Tensor | Blocks] | None]
"""A function from a layer's name to the eigenvectors of its A and G (EKFAC), or to None if there
are none yet."""


@dataclass(slots=True)
class Collected:
    """The moments of one layer since the last :meth:`Moments.pop`."""

    a: Tensor
    """Sum of a a^T, [groups, a_dim, a_dim], or [groups, a_dim] if A is diagonal. The blocks of a
    divided A are side by side (:func:`.gram.flat_blocks`)."""
    g: Tensor
    """Sum of g g^T, in the same way."""
    samples: Number
    """Samples by the layer's own inputs."""
    rows: Number
    """Samples times shared positions: the number of terms in ``a``."""
    second_moment: Tensor | None = None
    """EKFAC's, [groups, g_dim, a_dim]."""
    loss_samples: Number | None = None
    """The whole ``samples``, if ranks share them out. None: ``samples``."""
    examples: Number | None = None
    """Examples that the loss is a mean over. None: those of ``loss_samples``."""

    def scales(self, scale: Scale, *, is_conv: bool) -> tuple[Number, Number]:
        """Return the factors of raw A and raw G; see :data:`.gram.CONVENTIONS`.

        Messages later average over ranks: A weighted by ``rows``, G by :attr:`weight_of_g`.
        """
        n = self.samples if self.loss_samples is None else self.loss_samples
        a, g = scale(n, self.rows / self.samples, is_conv)
        return a * n / self.samples, g * self.all_examples / self.samples

    @property
    def all_examples(self) -> Number:
        """The examples that the loss of this rank is a mean over."""
        if self.examples is not None:
            return self.examples
        return self.samples if self.loss_samples is None else self.loss_samples

    @property
    def weight_of_g(self) -> Number:
        """The examples that this rank stands for, if ranks share them out."""
        if self.loss_samples is None:
            return self.all_examples
        return self.samples * (self.all_examples / self.loss_samples)


@dataclass(slots=True)
class _PositionSums:
    """Sums over positions of one layer in one forward, for ``weight_sharing="reduce"``."""

    a: Tensor
    g: Tensor
    samples: int
    positions: float
    forward: Forward


@dataclass(slots=True)
class _Calls:
    """The calls (x, g) of one layer in one forward, which EKFAC needs together."""

    layer: Layer
    samples: int
    forward: Forward
    pairs: list[tuple[Tensor, Tensor]]


class Moments:
    """The sums of all layers.

    Args:
        reduce: Whether a is averaged and g summed over positions before the product
            (Eschenhagen et al. 2023), instead of counting each position ("expand").
        eigenbasis: Returns the eigenvectors of the layers whose second moments are wanted.
    """

    def __init__(self, *, reduce: bool = False, eigenbasis: Eigenbasis = lambda name: None) -> None:
        self._reduce, self._eigenbasis = reduce, eigenbasis
        self._collected: dict[str, Collected] = {}
        self._sums: dict[str, tuple[Layer, _PositionSums]] = {}
        self._second_moments: dict[str, Tensor] = {}
        self._calls: dict[str, _Calls] = {}
        # By layer: samples of its inputs, these samples on all ranks, examples of the model.
        self._samples: dict[str, Counts] = {}
        self._loss_samples: dict[str, Counts] = {}
        self._examples: dict[str, Counts] = {}
        self._families: dict[str, dict[int, Family]] = {}  # by layer and call

    def count_loss_samples(self, layer: Layer, g: Tensor, forward: Forward) -> None:
        """Count the samples of a call that ranks share out, before the rank takes its part."""
        self._loss_samples.setdefault(layer.name, {})[forward] = len(g) if g.ndim > 1 else 1

    def add(
        self,
        layer: Layer,
        x: Any,
        g: Tensor,
        forward: Forward,
        *,
        examples: int | None = None,
        magnitude: int = 0,
        first: bool = True,
        alone: bool,
    ) -> None:
        """Add one call of a layer.

        Args:
            layer: The layer.
            x: The input of the layer, :attr:`Call.x`.
            g: The gradient of its output.
            forward: The forward and backward. Calls of the same and with equally many samples are
                further positions of these samples.
            examples: The examples of this forward of the model, if they are known. None: the
                samples of the layer's input.
            magnitude: If not 0, g becomes the gradient of a sum over the examples of this forward:
                it is multiplied by their number and divided by ``magnitude``.
            first: False if this call was counted before, with another gradient. Its A then does
                not count again.
            alone: Whether the layer has no other call in this forward.
        """
        samples, positions = layer.size(x, g)
        if examples is not None:
            self._examples.setdefault(layer.name, {})[forward] = examples
        if magnitude:
            # The factor may be tiny, and g in half precision would become zero.
            g = at_least_float32(g) * ((examples or samples) / magnitude)
        if self._reduce:
            self._add_sums(layer, x, g, _PositionSums(x, g, samples, positions, forward), first)
        else:
            # A layer may return whole matrices although only their blocks are kept.
            a = flat_blocks(layer.moment_a(x, g), layer.spec.a_blocks) if first else None
            of_g = flat_blocks(layer.moment_g(x, g), layer.spec.g_blocks)
            self._count(layer, a, of_g, samples, samples * positions, forward)
        if self._eigenbasis(layer.name) is not None:
            self._add_call(_Calls(layer, samples, forward, [(x, g)]), alone)

    def add_use(self, number: int, use: tuple[bool, Tensor, Tensor], family: Family) -> None:
        """Add a use of the call ``number`` to its ``family``, which is new if it is the first."""
        name = family.layer.name
        if any(other.forward != family.forward for other in self._families.get(name, {}).values()):
            self._end_families(name)
        self._families.setdefault(name, {}).setdefault(number, family).uses.append(use)

    def _end_families(self, name: str) -> None:
        """Add the families of a layer, for which no more uses will come."""
        for family in self._families.pop(name, {}).values():
            a, g = family.rows()
            self.add(
                family.layer,
                a,
                g,
                family.forward,
                examples=family.examples,
                magnitude=family.magnitude,
                alone=False,
            )

    def _add_call(self, new: _Calls, alone: bool) -> None:
        """Square the gradients of samples as soon as all calls of a forward are there."""
        # The gradient of a sample is a sum over calls, so squaring each call would be wrong.
        name = new.layer.name
        old = self._calls.get(name)
        # Calls of one forward can have other samples (a head on boxes). These do not add up.
        if old is not None and (old.layer, old.forward, old.samples) == (
            new.layer,
            new.forward,
            new.samples,
        ):
            old.pairs += new.pairs
        else:
            if old is not None:
                self._square(name)
            self._calls[name] = new
        if alone:
            self._square(name)

    def _square(self, name: str) -> None:
        calls, basis = self._calls.pop(name), self._eigenbasis(name)
        if basis is None:  # a state without eigenvectors was loaded meanwhile
            return
        with without_autocast(calls.layer.weight):
            new = calls.layer.second_moment(calls.pairs, *basis)
        old = self._second_moments.get(name)
        self._second_moments[name] = new if old is None else old + new

    def _count(
        self, layer: Layer, a: Tensor | None, g: Tensor, samples: int, rows: float, forward: Forward
    ) -> None:
        """Add the moments of one call; ``a`` is None if A was counted with an earlier seed."""
        old, counted = self._collected.get(layer.name), self._samples.setdefault(layer.name, {})
        # Calls of one forward are positions of the same samples: count the samples once.
        is_new = forward not in counted
        counted.setdefault(forward, samples)
        if old is None:
            assert a is not None
            self._collected[layer.name] = Collected(a, g, samples, rows)
            return
        old.g += g
        if a is not None:
            old.a += a
            old.rows += rows
        if is_new:
            old.samples += samples

    def _add_sums(
        self, layer: Layer, x: Tensor, g: Tensor, new: _PositionSums, first: bool
    ) -> None:
        """Add up positions, also over calls, before the product ("reduce")."""
        new.a, new.g = layer.sums(x, g)
        if layer.name in self._sums:
            old = self._sums[layer.name][1]
            if old.forward == new.forward and old.samples == new.samples:
                old.a, old.g = old.a + new.a, old.g + new.g
                old.positions += new.positions
                return
            self._close(layer.name, first)
        self._sums[layer.name] = layer, new

    def _close(self, name: str, first: bool = True) -> None:
        """Compute the moments of a mean and a sum over all positions of a forward."""
        layer, sums = self._sums.pop(name)
        a = layer.moment_of_a(sums.a / sums.positions) if first else None
        g = layer.moment_of_g(sums.g)
        self._count(layer, a, g, sums.samples, sums.samples, sums.forward)

    def pop_layer(self, name: str) -> Collected | None:
        """Return and forget the sums of one layer, for which nothing more will come.

        None if all calls of the layer had no samples.
        """
        self._end_forwards(name)
        taken = self._collected.pop(name, None)
        loss_samples = self._loss_samples.pop(name, None)
        if taken is not None:
            taken.second_moment = self._second_moments.pop(name, None)
            taken.loss_samples = None if loss_samples is None else sum(loss_samples.values())
            taken.examples = self._all_examples(name, loss_samples or {})
        return taken

    def _all_examples(self, name: str, loss_samples: Counts) -> Number:
        """Return the examples of all forwards, also of those in which the layer got no rows."""
        own = self._samples[name] | loss_samples | self._examples.get(name, {})
        seen = {forward for forward, _ in own}
        others = {
            forward: n
            for counts in self._examples.values()
            for (forward, _), n in counts.items()
            # A tensor says that another layer's gradient was perhaps discarded.
            if forward not in seen and not isinstance(n, Tensor)
        }
        return sum(own.values()) + sum(others.values())

    def _end_forwards(self, name: str) -> None:
        """Finish the sums over the calls of a forward: no more of them will come."""
        self._end_families(name)
        if name in self._sums:
            self._close(name)
        if name in self._calls:
            self._square(name)

    def forget(self, name: str) -> None:
        """Forget the sums of one layer."""
        for sums in (
            self._collected,
            self._second_moments,
            self._sums,
            self._calls,
            self._samples,
            self._loss_samples,
            self._families,
            self._examples,
        ):
            sums.pop(name, None)

    def forget_where(self, name: str, is_discarded: Tensor) -> None:
        """Forget the sums of one layer if ``is_discarded``, a bool on the device.

        The host does not wait for it. The counts become tensors therefore.
        """
        self._end_forwards(name)
        old = self._collected.get(name)
        if old is None:
            return
        kept = (~is_discarded).to(old.g.dtype)
        sums = [old.a, old.g]
        if name in self._second_moments:
            sums.append(self._second_moments[name])
        for x in sums:
            x.masked_fill_(is_discarded, 0.0)  # not a product, which would keep nan
        old.samples, old.rows = old.samples * kept, old.rows * kept
        for sums_of in (self._samples, self._loss_samples, self._examples):
            counts = sums_of.get(name, {})
            counts.update({forward: n * kept for forward, n in counts.items()})

    def end_backward(self, *, first: bool) -> None:
        """Finish all forwards so far: with this gradient, no more of their calls will come."""
        for name in list(self._families):
            self._end_families(name)
        for name in list(self._sums):
            self._close(name, first)
        for name in list(self._calls):
            self._square(name)

    def pop(self) -> dict[str, Collected]:
        """Return the sums since the last call, by layer; layers that were not used are missing."""
        self.end_backward(first=True)
        collected = {name: self.pop_layer(name) for name in list(self._collected)}
        for counts in (self._samples, self._loss_samples, self._examples):
            counts.clear()
        return {name: taken for name, taken in collected.items() if taken is not None}
