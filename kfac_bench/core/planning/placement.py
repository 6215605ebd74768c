"""Place layers on the grid of ranks, so that the load is balanced."""

from collections.abc import Callable, Sequence

from kfac_bench.core.planning.cost import Cost
from kfac_bench.core.planning.layer_spec import Factor, LayerSpec
from kfac_bench.core.planning.plan import Placement, Strategy
from kfac_bench.core.planning.sizes import kept_bytes, moments_bytes

FactorWeight = Callable[[LayerSpec, Factor], float]


def gradient_workers(row: Strategy, fraction: float | None, world_size: int) -> int:
    """Return how many of the ranks precondition a layer: the fraction must give a divisor."""
    if fraction is None or not row.adjustable:
        fraction = row.fraction
    if not 0 <= fraction <= 1:
        raise ValueError(f"grad_worker_fraction={fraction:g}: choose a fraction from 0 to 1")
    workers = max(1, round(world_size * fraction))
    if world_size % workers:
        raise ValueError(
            f"grad_worker_fraction={fraction:g} of {world_size} ranks is {workers} gradient "
            f"workers, which do not divide the ranks: choose k/{world_size} with k a divisor"
        )
    return workers


def columns(world_size: int, workers: int) -> list[tuple[int, ...]]:
    """Return the columns of the grid: the ranks that are gradient workers of the same layers."""
    width = world_size // workers
    return [tuple(range(c, world_size, width)) for c in range(width)]


def work_of(spec: LayerSpec, factor: Factor, cost: Cost) -> float:
    """Return the cost of decomposing a factor, 0 for a diagonal."""
    return 0.0 if spec.is_diagonal(factor) else spec.groups * cost(spec.dim(factor))


def weigh(
    balance: str, owned: bool, workers: int, cost: Cost, method: str, itemsize: int
) -> tuple[Callable[[LayerSpec], float], FactorWeight]:
    """Return the weight of a layer for its column, and that of a factor for a worker in it.

    Args:
        balance: What to balance, ``compute`` or ``memory``.
        owned: Whether only the rank that decomposes a factor keeps it. Otherwise all ranks keep
            all factors, and there is no memory to balance among the workers of a column.
        workers: Gradient workers of a layer.
        cost: The cost of decomposing an [n, n] matrix.
        method: How factors are decomposed.
        itemsize: Bytes per element of dense factors and decompositions.
    """

    def work(spec: LayerSpec, factor: Factor) -> float:
        return work_of(spec, factor, cost)

    def kept(spec: LayerSpec, factor: Factor) -> float:
        return kept_bytes(spec, factor, method, itemsize)[0]

    def kept_by_column(spec: LayerSpec) -> float:
        each = [kept_bytes(spec, f, method, itemsize) for f in spec.factors]
        # Each gradient worker keeps the decompositions and Adam's moments, one of them the factor:
        # so on average a worker keeps 1 / workers of it.
        moments = moments_bytes(spec, method)
        return moments + sum(d + (f / workers if owned else 0) for f, d in each)

    if balance == "compute":
        return lambda spec: sum(work(spec, f) for f in spec.factors), work
    return kept_by_column, kept if owned else work


def place(
    layers: Sequence[LayerSpec],
    columns: Sequence[tuple[int, ...]],
    is_colocated: Callable[[LayerSpec], bool],
    on_column: Callable[[LayerSpec], float],
    on_worker: FactorWeight,
) -> tuple[Placement, ...]:
    """Give each layer a column of the grid, and each factor a worker in it, the heaviest first.

    Each goes to the column or rank with the smallest load so far (longest processing time first).
    If a layer ``is_colocated``, one worker decomposes all its factors.
    """
    column_load = [0.0] * len(columns)
    load = dict.fromkeys((r for column in columns for r in column), 0.0)
    placed: dict[str, Placement] = {}
    # The name breaks ties: every rank must find the same order.
    for spec in sorted(layers, key=lambda s: (-on_column(s), s.name)):
        c = column_load.index(min(column_load))
        column_load[c] += on_column(spec)
        weight = {f: on_worker(spec, f) for f in spec.factors}
        heavy_first = sorted(spec.factors, key=lambda f: -weight[f])
        worker: dict[Factor, int] = {}
        for factors in [spec.factors] if is_colocated(spec) else [(f,) for f in heavy_first]:
            rank = min(columns[c], key=lambda r: (load[r], r))
            load[rank] += sum(weight[f] for f in factors)
            worker |= dict.fromkeys(factors, rank)
        placed[spec.name] = Placement(spec, tuple(worker[f] for f in spec.factors), columns[c])
    return tuple(placed[s.name] for s in layers)


def place_in_turn(layers: Sequence[LayerSpec], world_size: int) -> tuple[Placement, ...]:
    """Give layers to ranks in turn, whatever the layers weigh."""
    turns = [i % world_size for i in range(len(layers))]
    return tuple(
        Placement(s, (r,) * len(s.factors), (r,)) for s, r in zip(layers, turns, strict=True)
    )
