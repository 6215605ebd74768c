"""The rows of a plan, and the plan: who does what in a K-FAC step, an immutable table.

Each kind of work or message is one small frozen type, an :class:`Op`. A :class:`Plan` follows only
from layer shapes, world size and options (:mod:`.planner`). It has no tensor, no process group and
no rank of its reader, so every rank builds the same plan. The executor runs the plan, the memory
and communication report sums it, and the simulator times it.

The grid of gradient workers (KAISA), here for 8 ranks and 2 gradient workers per layer::

        col 0  col 1  col 2  col 3      a layer lives in one column: its gradient workers,
        -----  -----  -----  -----      who hold its decompositions and precondition it
    row 0  0      1      2      3
    row 1  4      5      6      7       a row shares preconditioned gradients

The strategies differ in the number of gradient workers of a layer, and in who gets its factors:

* ``comm_opt``: all ranks are gradient workers (K-FAC-opt, section 4.2 of the paper).
* ``layer_wise``: one gradient worker, layers in turn (Osawa et al. 2019; K-FAC-lw in the paper).
* ``mem_opt``: one gradient worker, balanced by work (KAISA).
* ``hybrid_opt``: any number between them (KAISA).
* ``owner_reduce``: only the rank that decomposes a factor gets and keeps it.
* ``local_factors``: no factor is sent. A rank computes its factors from its own batch only.

In the first four, every rank keeps every factor.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

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
    """Sum <p, g>, <p, p>, <g, g> and <w, w> of each layer over the ranks, which hold parts.

    g is the gradient of a layer, p the preconditioned one, w the weight. The KL clip, grafting, the
    trust ratio and cosines need these products.
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


EIGEN_ADAM = "eigen_adam"
"""Adam in the eigenbasis: its gradient workers keep moments of the gradients."""
METHODS = ("eigen", "inverse", "ekfac", EIGEN_ADAM)
IDENTITY = "identity"
"""The method of a control experiment: its plan has neither factors nor decompositions."""
BALANCES = ("compute", "memory")

FactorsOn = Literal["all", "owner", "local"]
"""The ranks that get the statistics of all ranks: all, the rank that decomposes, or none."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One row of :data:`STRATEGY_TABLE`: the choices from which the planner makes a plan."""

    fraction: float
    """Share of the ranks that are gradient workers of a layer; at least one rank is."""
    adjustable: bool = False
    """True if the option ``grad_worker_fraction`` may replace the fraction."""
    colocate: bool = True
    """True if one rank decomposes both factors of a layer. The option ``colocate_factors``
    may replace the value. Layers with a divided factor are an exception."""
    factors: FactorsOn = "all"
    in_turn: bool = False
    """True if layers go to ranks in turn, regardless of the cost of the layers."""


STRATEGY_TABLE = {
    "comm_opt": Strategy(1.0, colocate=False),  # section 4.3: A and G on different ranks
    "layer_wise": Strategy(0.0, in_turn=True),
    "mem_opt": Strategy(0.0),
    "hybrid_opt": Strategy(0.5, adjustable=True),
    "owner_reduce": Strategy(0.0, adjustable=True, factors="owner"),
    "local_factors": Strategy(0.0, adjustable=True, factors="local"),
}
STRATEGIES = tuple(STRATEGY_TABLE)


class Stage(Enum):
    """The three parts of a K-FAC step; each runs at its own frequency."""

    FACTORS = "factors"
    DECOMPOSE = "decompose"
    PRECONDITION = "precondition"


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks that do the work of one layer."""

    layer: LayerSpec
    workers: tuple[int, ...]
    """The rank that decomposes each of ``layer.factors``."""
    grad_workers: tuple[int, ...]

    def worker(self, factor: Factor) -> int:
        """Return the rank that decomposes the factor."""
        return self.workers[self.layer.factors.index(factor)]

    @property
    def a_worker(self) -> int:
        """The rank that decomposes A, or the first block of A."""
        return self.workers[0]

    @property
    def is_colocated(self) -> bool:
        """True if one rank decomposes all factors of the layer."""
        return len(set(self.workers)) == 1


@dataclass(frozen=True, slots=True)
class Plan:
    """The placements of layers, and the table of ops that follows from them.

    Whoever executes a plan keeps this contract: every rank runs the ops that it takes part in, in
    the plan's order. Messages start asynchronously. A stage ends when its messages have arrived.
    So all ranks meet shared messages in the same order, and there is no deadlock.
    """

    world_size: int
    strategy: str
    method: str
    placements: tuple[Placement, ...]
    factors: tuple[Op, ...]
    slices: tuple[tuple[Op, ...], ...]
    """The decompose stage, in slices of about equal work that may run at different steps."""
    precondition: tuple[Op, ...]
    itemsize: int = 4
    """Bytes per element of dense factors, eigenvectors and inverses; everything else is fp32."""
    sharded: bool = False
    """True if each rank holds only parts of the gradients (FSDP2, tensor parallel)."""

    @property
    def factors_on(self) -> FactorsOn:
        """The ranks that get the statistics, and therefore keep the running factors."""
        return STRATEGY_TABLE[self.strategy].factors

    def keeps(self, rank: int, placement: Placement, factor: Factor) -> bool:
        """Return whether ``rank`` keeps the running factor."""
        return self.factors_on == "all" or rank == placement.worker(factor)

    @property
    def colocated(self) -> bool:
        """True if the rank that decomposes a factor also keeps the other factors of the layer."""
        return self.factors_on == "all" or all(p.is_colocated for p in self.placements)

    @property
    def decompose(self) -> tuple[Op, ...]:
        """The ops of all slices, one slice after the other."""
        return tuple(op for part in self.slices for op in part)

    def ops(self, *stages: Stage) -> Iterator[Op]:
        """Yield the ops of the stages, by default all three, in order."""
        for stage in stages or tuple(Stage):
            yield from getattr(self, stage.value)

    def digest(self) -> str:
        """Return a SHA-256 of the whole table, which ranks compare before they start."""
        # The repr of frozen dataclasses and tuples has every field, and no order of a hash table.
        return hashlib.sha256(repr(self).encode()).hexdigest()
