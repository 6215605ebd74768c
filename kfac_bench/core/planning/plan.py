"""Which rank does what in one K-FAC step: an immutable table, computed once.

A :class:`Plan` is a pure function of layer shapes, world size and strategy. It holds no tensor,
no process group and no "my rank", so every rank builds the same one (:mod:`.planner`); the step
executes it, the memory and communication report sums it, a simulator can time it.

The grid of gradient workers (KAISA), here for 8 ranks and 2 gradient workers per layer::

        col 0  col 1  col 2  col 3      a layer lives in one column: its gradient workers,
        -----  -----  -----  -----      who hold its decompositions and precondition it
    row 0  0      1      2      3
    row 1  4      5      6      7       a row shares preconditioned gradients

One gradient worker per layer is ``layer_wise`` (Osawa et al. 2019; K-FAC-lw in the paper) or
``mem_opt`` (KAISA: the same, balanced by work); all ranks is ``comm_opt`` (K-FAC-opt, the
paper's own, section 4.2); between them is ``hybrid_opt``. Of these, every rank keeps every factor.
In ``owner_reduce`` only the rank that decomposes a factor gets and keeps it; ``local_factors``
sends no factors at all: that rank makes them of its own batch alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

Factor = Literal["A", "G"]
FACTORS: tuple[Factor, ...] = ("A", "G")

METHODS = ("eigen", "inverse", "ekfac")
IDENTITY = "identity"
"""The method of a control whose plan has neither factors nor decompositions."""
BALANCES = ("compute", "memory")

FactorsOn = Literal["all", "owner", "local"]
"""Who gets the statistics of all ranks: every rank; the one that decomposes; nobody."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One row of :data:`STRATEGY_TABLE`: what the planner makes a plan of."""

    fraction: float
    """Share of ranks that are gradient workers of a layer; at least one is."""
    adjustable: bool = False
    """Whether ``grad_worker_fraction`` may say another one."""
    colocate: bool = True
    """Whether one rank decomposes both factors of a layer, unless ``colocate_factors`` says."""
    factors: FactorsOn = "all"
    in_turn: bool = False
    """Layers go to ranks one after the other, whatever they weigh."""


STRATEGY_TABLE = {
    "comm_opt": Strategy(1.0, colocate=False),  # section 4.3: factors on different workers
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
class LayerSpec:
    """Shapes of one layer seen as ``groups`` independent maps y = W a.

    The gradient is [groups, g_dim, a_dim]. A is [groups, a_dim, a_dim], or [groups, a_dim] where
    only its diagonal is kept (an embedding's tokens); G likewise (a head's vocabulary).
    """

    name: str
    a_dim: int  # inputs of the linear map, plus one if it has a bias
    g_dim: int  # outputs
    groups: int = 1
    a_diagonal: bool = False
    g_diagonal: bool = False

    def dim(self, factor: Factor) -> int:
        """Side of one block of A or G."""
        return self.a_dim if factor == "A" else self.g_dim

    def diagonal(self, factor: Factor) -> bool:
        """Whether only the factor's diagonal is kept."""
        return self.a_diagonal if factor == "A" else self.g_diagonal

    def factor_shape(self, factor: Factor) -> tuple[int, ...]:
        """Shape of the factor as it is stored."""
        n = self.dim(factor)
        return (self.groups, n) if self.diagonal(factor) else (self.groups, n, n)

    @property
    def grad_shape(self) -> tuple[int, int, int]:
        """Shape of the gradient as K-FAC sees it: weight and bias side by side."""
        return self.groups, self.g_dim, self.a_dim

    @property
    def grad_numel(self) -> int:
        """Elements of the gradient."""
        return self.groups * self.g_dim * self.a_dim


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


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one layer's work is done."""

    layer: LayerSpec
    a_worker: int  # decomposes A
    g_worker: int  # decomposes G
    grad_workers: tuple[int, ...]

    def worker(self, factor: Factor) -> int:
        """Rank that decomposes the factor."""
        return self.a_worker if factor == "A" else self.g_worker


@dataclass(frozen=True, slots=True)
class Plan:
    """Placements, and the table of ops that follows from them.

    The contract of whoever executes it: every rank runs the subsequence of ops it takes part in,
    in the plan's order; messages start asynchronously; a stage ends when its messages have
    arrived. Shared messages thus meet in one order on all ranks: no deadlock.
    """

    world_size: int
    strategy: str
    method: str
    placements: tuple[Placement, ...]
    factors: tuple[Op, ...]
    slices: tuple[tuple[Op, ...], ...]
    """The decompose stage, in parts of about equal work that may run at different steps."""
    precondition: tuple[Op, ...]
    itemsize: int = 4
    """Bytes per element of dense factors, eigenvectors and inverses, kept and sent; the rest is
    fp32."""
    sharded: bool = False
    """Whether each rank holds only parts of the gradients (FSDP2, tensor parallel)."""

    @property
    def factors_on(self) -> FactorsOn:
        """Who gets the statistics, and so keeps the running factors."""
        return STRATEGY_TABLE[self.strategy].factors

    def keeps(self, rank: int, placement: Placement, factor: Factor) -> bool:
        """Whether ``rank`` keeps the running factor."""
        return self.factors_on == "all" or rank == placement.worker(factor)

    @property
    def colocated(self) -> bool:
        """Whether the rank that decomposes a factor keeps the layer's other one, too."""
        return self.factors_on == "all" or all(p.a_worker == p.g_worker for p in self.placements)

    @property
    def decompose(self) -> tuple[Op, ...]:
        """All slices, one after the other."""
        return tuple(op for part in self.slices for op in part)

    def ops(self, *stages: Stage) -> Iterator[Op]:
        """Ops of the stages (all three by default), in order."""
        for stage in stages or tuple(Stage):
            yield from getattr(self, stage.value)

    def digest(self) -> str:
        """SHA-256 of the whole table; ranks compare it before they start."""
        return hashlib.sha256(repr(self).encode()).hexdigest()
