"""Divide the decompositions into slices that run at different steps."""

import math
from collections.abc import Sequence

from kfac_bench.core.planning.cost import Cost
from kfac_bench.core.planning.layer_spec import Factor
from kfac_bench.core.planning.placement import work_of
from kfac_bench.core.planning.plan import Placement

Unit = tuple[Placement, tuple[Factor, ...]]
"""The factors of one layer that must be decomposed at the same step."""


def divide(
    placements: Sequence[Placement], method: str, spread: int, cost: Cost
) -> list[list[Unit]]:
    """Return at most ``spread`` slices of about equal work.

    There are at most (total work) / (largest unit) slices: with more of them, the longest step
    would not become shorter. The world size and the ranks play no part, so the same factors are
    decomposed at the same step on any number of ranks.
    """
    # EKFAC measures second moments in the eigenbasis of A and G: both must change at one step.
    units: list[Unit] = [
        (p, factors)
        for p in reversed(placements)
        for factors in ([p.layer.factors] if method == "ekfac" else [(f,) for f in p.layer.factors])
    ]
    work = [sum(work_of(p.layer, f, cost) for f in factors) for p, factors in units]
    positive = [w for w in work if w > 0]
    count = min(spread, len(positive), math.ceil(sum(positive) / max(positive))) if positive else 1
    load = [0.0] * count
    slice_of = {}
    # The heaviest unit goes first, each to the lightest slice so far.
    for i in sorted(range(len(units)), key=lambda i: (-work[i], i)):
        slice_of[i] = load.index(min(load))
        load[slice_of[i]] += work[i]
    return [[u for i, u in enumerate(units) if slice_of[i] == k] for k in range(count)]
