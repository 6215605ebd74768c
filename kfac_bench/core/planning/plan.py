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
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from kfac_bench.core.planning.layer_spec import Factor, LayerSpec
from kfac_bench.core.planning.ops import Op

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
