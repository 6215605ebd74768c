"""Which ranks do the work of which layer: the grid, and how it is balanced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kfac_bench.core.planning.cost import Cost
from kfac_bench.core.planning.layer_spec import FACTORS, Factor, LayerSpec
from kfac_bench.core.planning.plan import Placement, Strategy
from kfac_bench.core.planning.sizes import kept_bytes

Weight = Callable[[LayerSpec, Factor], float]


def gradient_workers(row: Strategy, fraction: float | None, world_size: int) -> int:
    """How many of the ranks precondition a layer."""
    if fraction is None or not row.adjustable:
        fraction = row.fraction
    if not 0 <= fraction <= 1:
        raise ValueError(f"grad_worker_fraction={fraction:g}: must be in [0, 1]")
    workers = max(1, round(world_size * fraction))
    if world_size % workers:
        raise ValueError(
            f"grad_worker_fraction={fraction:g} of {world_size} ranks is {workers} gradient "
            f"workers, which do not divide the ranks; choose k/{world_size} with k a divisor"
        )
    return workers


def columns(world_size: int, workers: int) -> list[tuple[int, ...]]:
    """Of the grid: the ranks that may be gradient workers of one layer."""
    width = world_size // workers
    return [tuple(range(c, world_size, width)) for c in range(width)]


def work_of(spec: LayerSpec, factor: Factor, cost: Cost) -> float:
    """Cost of decomposing a factor; a diagonal is no work."""
    return 0.0 if spec.diagonal(factor) else spec.groups * cost(spec.dim(factor))


def weigh(
    balance: str, owned: bool, workers: int, cost: Cost, method: str, itemsize: int
) -> tuple[Callable[[LayerSpec], float], Weight]:
    """What a layer weighs for its gradient workers together, and a factor for the one it goes to.

    Of memory: each gradient worker keeps the decompositions; if factors are ``owned``, the one
    that decomposes keeps them, else all ranks do, and it may as well share the work.
    """

    def work(spec: LayerSpec, factor: Factor) -> float:
        return work_of(spec, factor, cost)

    def kept(spec: LayerSpec, factor: Factor) -> float:
        return kept_bytes(spec, factor, method, itemsize)[0]

    def kept_by_column(spec: LayerSpec) -> float:
        both = [kept_bytes(spec, f, method, itemsize) for f in FACTORS]
        return sum(d + (f / workers if owned else 0) for f, d in both)

    if balance == "compute":
        return lambda spec: sum(work(spec, f) for f in FACTORS), work
    return kept_by_column, kept if owned else work


def place(
    layers: Sequence[LayerSpec],
    columns: Sequence[tuple[int, ...]],
    colocate: bool,
    on_column: Callable[[LayerSpec], float],
    on_worker: Weight,
) -> tuple[Placement, ...]:
    """Columns of the grid, and workers in them, by longest-processing-time-first."""
    column_load = [0.0] * len(columns)
    load = dict.fromkeys((r for column in columns for r in column), 0.0)
    placed: dict[str, Placement] = {}
    for spec in sorted(layers, key=lambda s: (-on_column(s), s.name)):
        c = column_load.index(min(column_load))
        column_load[c] += on_column(spec)
        weight = {f: on_worker(spec, f) for f in FACTORS}
        heavy_first = sorted(FACTORS, key=lambda f: -weight[f])
        worker: dict[Factor, int] = {}
        for factors in [FACTORS] if colocate else [(f,) for f in heavy_first]:
            rank = min(columns[c], key=lambda r: (load[r], r))
            load[rank] += sum(weight[f] for f in factors)
            worker |= dict.fromkeys(factors, rank)
        placed[spec.name] = Placement(spec, worker["A"], worker["G"], columns[c])
    return tuple(placed[s.name] for s in layers)


def place_in_turn(layers: Sequence[LayerSpec], world_size: int) -> tuple[Placement, ...]:
    """One layer after the other, whatever they weigh."""
    turns = [i % world_size for i in range(len(layers))]
    return tuple(Placement(s, r, r, (r,)) for s, r in zip(layers, turns, strict=True))
