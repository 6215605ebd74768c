"""Sums of raw moments over the calls, positions and micro-batches of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kfac_bench.core.kernels.conventions import Scale
from kfac_bench.core.layers.base import Layer, moment

Eigenbasis = Callable[[str], tuple[Tensor, Tensor] | None]
"""Eigenvectors of A and G by layer, for EKFAC; None as long as there are none."""


@dataclass(slots=True)
class Collected:
    """Sums over the calls and micro-batches since the last :meth:`Moments.pop`."""

    a: Tensor
    g: Tensor
    samples: int
    rows: int
    forward: object
    """The forward and backward that ``samples`` last counted."""
    second_moment: Tensor | None = None
    loss_samples: int | None = None
    """Samples that the loss is a mean over, where ranks share them out; else ``samples``."""

    def scales(self, scale: Scale, *, is_conv: bool) -> tuple[float, float]:
        """Factors of raw A and raw G, so that a mean over ranks by ``samples`` is right."""
        n = self.loss_samples or self.samples
        a, g = scale(n, self.rows / self.samples, is_conv)
        return a * n / self.samples, g * n / self.samples


@dataclass(slots=True)
class _Sums:
    """Of one layer in one forward, for "reduce": sums over positions, until all have come."""

    a: Tensor
    g: Tensor
    samples: int
    positions: int
    forward: object


@dataclass(slots=True)
class _Calls:
    """Of one layer in one forward, for EKFAC: (x, g) of its calls, until all have come."""

    layer: Layer
    samples: int
    forward: object
    pairs: list[tuple[Tensor, Tensor]]


class Moments:
    """Adds up what the calls of the layers contribute.

    ``reduce`` sums a and g over positions before the product; ``eigenbasis`` says of which layers
    second moments are wanted, too.
    """

    def __init__(self, *, reduce: bool, eigenbasis: Eigenbasis) -> None:
        self._reduce, self._eigenbasis = reduce, eigenbasis
        self._collected: dict[str, Collected] = {}
        self._sums: dict[str, tuple[Layer, _Sums]] = {}
        self._second_moments: dict[str, Tensor] = {}
        self._calls: dict[str, _Calls] = {}

    def add(
        self,
        layer: Layer,
        x: Tensor,
        g: Tensor,
        forward: object,
        *,
        scale: Callable[[int], float] | None = None,
        first: bool = True,
        alone: bool,
    ) -> None:
        """One call's input and gradient of its output.

        ``forward`` names the forward and backward; ``scale`` gives what g is to be multiplied by,
        from the samples; ``first`` is False if the call's A was counted before, with another
        gradient; ``alone`` says that the layer has no other call in this forward.
        """
        samples, positions = layer.size(x, g)
        if scale is not None:
            g = g * scale(samples)
        if self._reduce:
            self._add_sums(layer, x, g, _Sums(x, g, samples, positions, forward), first)
        else:
            a = layer.moment_a(x, g) if first else None
            self._count(layer, a, layer.moment_g(x, g), samples, samples * positions, forward)
        if self._eigenbasis(layer.name) is not None:
            self._add_call(_Calls(layer, samples, forward, [(x, g)]), alone)

    def _add_call(self, new: _Calls, alone: bool) -> None:
        """A sample's gradient is the sum over a forward's calls: only then it is squared."""
        name = new.layer.name
        old = self._calls.get(name)
        if old is not None and (old.forward, old.samples) == (new.forward, new.samples):
            old.pairs += new.pairs
        else:
            if old is not None:
                self._square(name)
            self._calls[name] = new
        if alone:
            self._square(name)

    def _square(self, name: str) -> None:
        calls, basis = self._calls.pop(name), self._eigenbasis(name)
        if basis is None:  # a state was loaded meanwhile
            return
        new = calls.layer.second_moment(calls.pairs, *basis)
        old = self._second_moments.get(name)
        self._second_moments[name] = new if old is None else old + new

    def _count(
        self, layer: Layer, a: Tensor | None, g: Tensor, samples: int, rows: int, forward: object
    ) -> None:
        """Add one call's moments; ``a`` is None if they were counted with another seed."""
        old = self._collected.get(layer.name)
        if old is None:
            assert a is not None
            self._collected[layer.name] = Collected(a, g, samples, rows, forward)
            return
        old.g += g
        if a is not None:
            old.a += a
            old.rows += rows
        if old.forward != forward:
            old.samples += samples
            old.forward = forward

    def _add_sums(self, layer: Layer, x: Tensor, g: Tensor, new: _Sums, first: bool) -> None:
        """For "reduce": add up positions, also over calls, before the product."""
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
        """All positions of a forward are there: mean of a, sum of g, then the moments."""
        layer, sums = self._sums.pop(name)
        a = moment(sums.a / sums.positions, diagonal=layer.spec.a_diagonal) if first else None
        g = moment(sums.g, diagonal=layer.spec.g_diagonal)
        self._count(layer, a, g, sums.samples, sums.samples, sums.forward)

    def take(self, name: str) -> Collected | None:
        """What was added of one layer, of which no more will come before the next :meth:`pop`.

        None if that is nothing: all its calls were of no samples.
        """
        if name in self._sums:
            self._close(name)
        if name in self._calls:
            self._square(name)
        taken = self._collected.pop(name, None)
        if taken is not None:
            taken.second_moment = self._second_moments.pop(name, None)
        return taken

    def end_backward(self, *, first: bool) -> None:
        """No more calls of the forwards so far will come with this gradient."""
        for name in list(self._sums):
            self._close(name, first)
        for name in list(self._calls):
            self._square(name)

    def pop(self) -> dict[str, Collected]:
        """What was added since the last call, by layer; layers not used are missing."""
        self.end_backward(first=True)
        for name, second_moment in self._second_moments.items():
            self._collected[name].second_moment = second_moment
        collected, self._collected, self._second_moments = self._collected, {}, {}
        return collected
