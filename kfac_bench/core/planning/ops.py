"""The rows of a plan: one small frozen type per kind of work or message."""

from dataclasses import dataclass, field

from kfac_bench.core.planning.layer_spec import Factor, LayerSpec


@dataclass(frozen=True, slots=True)
class Op:
    """One row of the plan, in which ``ranks`` take part."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ComputeFactor(Op):
    """Compute the batch statistic of one factor."""

    layer: LayerSpec
    factor: Factor


@dataclass(frozen=True, slots=True)
class ComputeSecondMoment(Op):
    """Compute the second moments of one layer's gradients in its eigenbasis (EKFAC)."""

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
    """An op that sends a bucket of ``numel`` elements; ``index`` counts messages of one kind."""

    index: int
    numel: int
    itemsize: int = field(default=4, kw_only=True)
    """Bytes per element."""

    @property
    def name(self) -> str:
        """A name that is equal on all ranks and in every step, as Horovod and traces need it."""
        return f"{type(self).__name__}/{self.index}"


@dataclass(frozen=True, slots=True)
class ReduceScales(Message):
    """Sum the weight and the size of each statistic over ranks, in fp32.

    Half precision needs this message before statistics are sent: every rank then divides by the
    same size, and nothing overflows or vanishes. The messages after it wait for it.
    """

    members: tuple[tuple[LayerSpec, Factor], ...]


@dataclass(frozen=True, slots=True)
class ReduceFactors(Message):
    """Sum batch statistics over ranks: a packed triangle of each, and in fp32 its weight.

    If there is a ``root``, only this rank gets the sum, and it keeps these factors.
    """

    members: tuple[tuple[LayerSpec, Factor], ...]
    root: int | None = None


@dataclass(frozen=True, slots=True)
class ReduceSecondMoments(Message):
    """Sum second moments [groups, g_dim, a_dim] and their weights over ranks."""

    members: tuple[LayerSpec, ...]


@dataclass(frozen=True, slots=True)
class GatherGradients(Message):
    """Bring gradients, of which each rank holds a part, to their gradient workers.

    The message is a sum over ``ranks``: each rank adds its own part, and 0 elsewhere. The ``root``
    gets the sum, or all ranks if there is none.
    """

    root: int | None
    members: tuple[LayerSpec, ...]


@dataclass(frozen=True, slots=True)
class ReduceProducts(Message):
    """Sum <p, g>, <p, p> and <g, g> of each layer over the ranks, which hold parts of g and p.

    g is the gradient of a layer, p the preconditioned one. The KL clip and cosines need them.
    """


@dataclass(frozen=True, slots=True)
class ShareDecompositions(Message):
    """Send decompositions from ``root``, which made them, to the other gradient workers."""

    root: int
    members: tuple[tuple[LayerSpec, Factor], ...]


@dataclass(frozen=True, slots=True)
class ShareGradients(Message):
    """Send preconditioned gradients from ``root``, a gradient worker, along its row of the grid."""

    root: int
    members: tuple[LayerSpec, ...]
