"""Seconds and steps to the target, interpolated between the last two evaluations.

Evaluations are several steps apart, and a fast run needs few steps in all. So the moment of the
first evaluation that meets the target is too late, by up to one interval.
"""

import math
from dataclasses import dataclass

from kfac_bench.record import score
from kfac_bench.record.events import Evaluated, RunStarted
from kfac_bench.record.runs import number
from kfac_bench.record.score import WithEvents


@dataclass(frozen=True)
class Reached:
    """When a run met its target; both are infinite if it missed."""

    steps: float = math.inf
    seconds: float = math.inf


def reached(run: WithEvents) -> Reached:
    """Return when the straight line between two evaluations meets the target.

    The first of them is the last one before the target was met. Without an earlier evaluation, or
    with one that is not finite, the result is the moment of the evaluation itself.
    """
    event = score.target_reached(run)
    if event is None:
        return Reached()
    end = Reached(number(event.step), max(0.0, number(event.train_s)))
    metric = next((e.metric for e in run.events if isinstance(e, RunStarted)), "")
    curve = {
        number(e.step): (max(0.0, number(e.train_s)), number(e.metrics.get(metric)))
        for e in run.events
        if isinstance(e, Evaluated) and number(e.step) <= end.steps
    }
    earlier = [step for step in curve if step < end.steps]
    if not earlier or end.steps not in curve:
        return end
    step, (seconds, before) = max(earlier), curve[max(earlier)]
    share = (number(event.target) - before) / (curve[end.steps][1] - before or math.nan)
    if not 0 <= share <= 1:  # also NaN
        return end
    return Reached(step + share * (end.steps - step), seconds + share * (end.seconds - seconds))
