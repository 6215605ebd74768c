"""A run's curves as points: what of them can be drawn, and fewer of them that show as much."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from kfac_bench.record.events import Trained
from kfac_bench.record.runs import Run, number
from kfac_bench.record.score import metric_curve

HUGE = 1e30  # what a diverged run says beyond this is not drawn

Point = tuple[float, float, float]  # step, training seconds, value


def points(run: Run, *, metric: bool) -> list[Point]:
    """The validation metric's curve or the training loss's, without what cannot be drawn."""
    if metric:
        curve = metric_curve(run)
    else:
        curve = [
            (number(e.step), number(e.train_s), number(e.loss))
            for e in run.events
            if isinstance(e, Trained)
        ]
    return [point for point in curve if drawable(point)]


def drawable(point: Point) -> bool:
    """Whether the point is somewhere: NaN, infinity and what is as good as that are not."""
    return all(abs(x) < HUGE for x in point)


def worst_shown(curves: Iterable[Sequence[float]], *, higher_is_better: bool) -> float:
    """The worst of the curves' values that an axis has room for: who diverges hides no other run.

    As far beyond the worst start as that is from zero, or half as far as any run came from it.
    Infinite where none came to anything better than that start.
    """
    sign = -1.0 if higher_is_better else 1.0
    badness = [[sign * value for value in curve] for curve in curves if curve]
    start = max((curve[0] for curve in badness), default=0.0)
    best = min((value for curve in badness for value in curve), default=start)
    if best >= start:
        return sign * math.inf
    return sign * (start + max(abs(start), (start - best) / 2))


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """At most ``most`` (4 or more) of the points, and no peak lost.

    The first, the last, and of equal stretches between them the lowest and the highest.
    """
    if len(points) <= most:
        return list(points)
    inner, stretches = len(points) - 2, (most - 2) // 2
    edges = [1 + inner * i // stretches for i in range(stretches + 1)]
    kept = [0]
    for start, end in pairwise(edges):
        low = min(range(start, end), key=lambda i: points[i][2])
        high = max(range(start, end), key=lambda i: points[i][2])
        kept += sorted({low, high})
    kept.append(len(points) - 1)
    return [points[i] for i in kept]
