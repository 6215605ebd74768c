"""Curves of a run as points that can be drawn, and fewer points that show the same shape."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from kfac_bench.record.events import Trained
from kfac_bench.record.runs import Run, number
from kfac_bench.record.score import metric_curve

HUGE = 1e30
"""Values of a diverged run beyond this limit are not drawn."""

CurvePoint = tuple[float, float, float]
"""Step, training seconds, value."""


def points(run: Run, *, metric: bool) -> list[CurvePoint]:
    """Return the points of the validation metric or of the training loss that can be drawn."""
    if metric:
        curve = metric_curve(run)
    else:
        curve = [
            (number(e.step), number(e.train_s), number(e.loss))
            for e in run.events
            if isinstance(e, Trained)
        ]
    return [point for point in curve if drawable(point)]


def drawable(point: CurvePoint) -> bool:
    """Return whether the point can be drawn: no NaN, and no value beyond ``HUGE``."""
    return all(abs(x) < HUGE for x in point)


def worst_shown(
    curves: Iterable[Sequence[float]], *, higher_is_better: bool, goal: float | None = None
) -> float:
    """Return the worst value that an axis shows, so that all other values can be read.

    A run that diverges must not hide the others. With S the worst start and B the best value of
    all curves, the limit lies beyond S by the size of S, or by half the distance from S to B if
    that is more. It is infinite if no curve improved on S.

    Shares such as an accuracy, with a ``goal`` below 1, have a tighter limit: 0.1 at the start
    would leave no room to tell 0.96 from 0.97. The axis begins at four times the goal's distance
    from 1, or lower if a run would not be seen at all.
    """
    drawn = [curve for curve in curves if curve]
    # With this sign a greater number is always a worse one.
    sign = -1.0 if higher_is_better else 1.0
    badness = [[sign * value for value in curve] for curve in drawn]
    start = max((curve[0] for curve in badness), default=0.0)
    best = min((value for curve in badness for value in curve), default=start)
    worst = math.inf if best >= start else start + max(abs(start), (start - best) / 2)
    if higher_is_better and goal is not None and _are_shares(drawn, goal):
        worst = min(worst, -min(1 - 4 * (1 - goal), *(max(curve) for curve in drawn)))
    return sign * worst


def _are_shares(curves: Sequence[Sequence[float]], goal: float) -> bool:
    values = [value for curve in curves for value in curve]
    return bool(values) and 0 < goal < 1 and all(0 <= value <= 1 for value in values)


def thin(points: Sequence[CurvePoint], most: int) -> list[CurvePoint]:
    """Return at most ``most`` (4 or more) of the points, without losing a peak.

    These are the first and the last point. Between them, the points are divided into equal
    stretches, and each stretch keeps its lowest and its highest point.
    """
    if len(points) <= most:
        return list(points)
    # Each stretch keeps two points, and the first and the last point are kept anyway.
    inner, stretches = len(points) - 2, (most - 2) // 2
    edges = [1 + inner * i // stretches for i in range(stretches + 1)]
    kept = [0]
    for start, end in pairwise(edges):
        low = min(range(start, end), key=lambda i: points[i][2])
        high = max(range(start, end), key=lambda i: points[i][2])
        kept += sorted({low, high})
    kept.append(len(points) - 1)
    return [points[i] for i in kept]
