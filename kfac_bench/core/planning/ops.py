"""The rows of a plan: one small frozen type per kind of work or message."""

from __future__ import annotations

from dataclasses import dataclass, field

from kfac_bench.core.planning.layer_spec import Factor, LayerSpec


@dataclass(frozen=True, slots=True)
class Op:
    """One row of the table: ``ranks`` take part."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ComputeFactor(Op):
    """The fresh batch statistic of one factor."""

    layer: LayerSpec
    factor: Factor


@dataclass(frozen=True, slots=True)
class ComputeSecondMoment(Op):
    """The fresh second moments of one layer's gradients in its eigenbasis (EKFAC)."""

    layer: LayerSpec


@dataclass(frozen=True, slots=True)
class Decompose(Op):
    """Eigendecompose or invert running factors of one shape, as one batch."""

    members: tuple[tuple[LayerSpec, Factor], ...]


@dataclass(frozen=True, slots=True)
class Precondition(Op):
    """Multiply gradients of one shape by their damped inverse curvatures, as one batch."""

    members: tuple[LayerSpec, ...]


@dataclass(frozen=True, slots=True)
class Message(Op):
    """An op that sends a bucket of ``numel`` elements; ``index`` counts within its kind."""

    index: int
    numel: int
    itemsize: int = field(default=4, kw_only=True)
    """Bytes per element."""

    @property
    def name(self) -> str:
        """The same on all ranks and in every step (Horovod needs it, traces show it)."""
        return f"{type(self).__name__}/{self.index}"


@dataclass(frozen=True, slots=True)
class ReduceScales(Message):
    """Sum each statistic's weight and size over ranks, in fp32, before half precision sends them.

    With it every rank divides by the same size, and nothing overflows or vanishes. The messages
    after it wait for it.
    """

    members: tuple[tuple[LayerSpec, Factor], ...]


@dataclass(frozen=True, slots=True)
class ReduceFactors(Message):
    """Sum fresh statistics over ranks: of each a packed triangle, and in fp32 its weight.

    With a ``root``, which keeps these factors, only that rank gets the sum.
    """

    members: tuple[tuple[LayerSpec, Factor], ...]
    root: int | None = None


@dataclass(frozen=True, slots=True)
class ReduceSecondMoments(Message):
    """Sum fresh second moments over ranks: of each the [groups, g_dim, a_dim] and its weight."""

    members: tuple[LayerSpec, ...]


@dataclass(frozen=True, slots=True)
class GatherGradients(Message):
    """Put together, on the gradient workers, gradients of which each rank holds a part.

    A sum over ``ranks`` of what is 0 but for a rank's own part; ``root`` gets it, or all do.
    """

    root: int | None
    members: tuple[LayerSpec, ...]


@dataclass(frozen=True, slots=True)
class ReduceProducts(Message):
    """Sum what each rank's parts add to <p, g>, <p, p> and <g, g> of each layer.

    g is a layer's gradient, p the preconditioned one: the clip factor and cosines need them.
    """


@dataclass(frozen=True, slots=True)
class ShareDecompositions(Message):
    """Send decompositions from ``root``, which made them, to the gradient workers."""

    root: int
    members: tuple[tuple[LayerSpec, Factor], ...]


@dataclass(frozen=True, slots=True)
class ShareGradients(Message):
    """Send preconditioned gradients from ``root``, a gradient worker, along its row."""

    root: int
    members: tuple[LayerSpec, ...]
