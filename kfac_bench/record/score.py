"""Results of runs, computed from their event files alone: times to target, curves and notes.

A run that misses its target, fails or never ends has an infinite time to target; no run is left
out. All functions are pure, but :func:`notes` also reads the manifests of checkpoints.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from kfac_bench.record.event_log import lost_events
from kfac_bench.record.events import (
    Evaluated,
    Event,
    RecordGap,
    RunStarted,
    TargetReached,
)
from kfac_bench.record.runs import (
    Run,
    Setting,
    clock,
    differences,
    flatten,
    number,
    option,
    plain,
    seed,
    target,
)

CONFIDENCE = 0.95


class WithEvents(Protocol):
    """A run, or a part of its record that a program keeps: its events, in order."""

    @property
    def events(self) -> Sequence[Event]:
        """The events."""
        ...


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum over runs; a run that missed its target counts as infinite."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One line of the result table: a summary of the runs of a setting.

    ``reached`` of the ``seeds`` runs met the target. ``seconds`` are seconds of the training clock.
    ``final`` is the median of the last validation metric, NaN if there is none.
    """

    task: str
    optimizer: str
    seeds: int
    reached: int
    has_target: bool
    steps: Spread
    seconds: Spread
    final: float


def target_reached(run: WithEvents) -> TargetReached | None:
    """Return the event of the moment when the target was met; None if it was missed.

    This is the first event of a target that is as hard as that of the run's first start. A later
    start may have had another ``trainer.target``, but tables name the first one.
    """
    goal, sign = math.nan, 1.0
    for event in run.events:
        if isinstance(event, RunStarted):
            goal = number(option(event.config, "trainer", "target"))
            sign = 1.0 if event.higher_is_better else -1.0
        elif isinstance(event, TargetReached) and not sign * number(event.target) < sign * goal:
            return event
    return None


def time_to_target_s(run: WithEvents) -> float:
    """Return the training seconds until the target was met; infinite if it was missed."""
    event = target_reached(run)
    seconds = math.inf if event is None else number(event.train_s)
    return math.inf if math.isnan(seconds) else seconds


def steps_to_target(run: WithEvents) -> float:
    """Return the optimizer steps until the target was met; infinite if it was missed."""
    event = target_reached(run)
    steps = math.inf if event is None else number(event.step)
    return math.inf if math.isnan(steps) else steps


def metric_curve(run: Run) -> list[tuple[float, float, float]]:
    """Return (step, training seconds, validation metric) of every evaluation, in order."""
    return [
        (number(e.step), number(e.train_s), number(e.metrics[run.started.metric]))
        for e in run.events
        if isinstance(e, Evaluated) and run.started.metric in e.metrics
    ]


def final_metric(run: Run) -> float:
    """Return the metric at the last evaluation; NaN if there was none."""
    curve = metric_curve(run)
    return curve[-1][2] if curve else math.nan


def best_metric(run: Run) -> float:
    """Return the best value of the metric; NaN if it never had a value."""
    values = [value for _, _, value in metric_curve(run) if not math.isnan(value)]
    best = max if run.started.higher_is_better else min
    return best(values, default=math.nan)


def status(run: Run) -> str:
    """Return the status at the end of the run (``finished``, ``failed``, ...), or ``not ended``."""
    return plain(run.ended.status) if run.ended else "not ended"


def spread(values: Iterable[float]) -> Spread:
    """Return median and range. The median of 5, inf, inf is inf."""
    ordered = sorted(values)
    return Spread(statistics.median(ordered), ordered[0], ordered[-1])


def mean_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the ends of its 95 % t interval: (mean, low, high).

    One value has no interval: both ends are the value.

    Raises:
        ValueError: There are no values, or one is not finite.
    """
    from scipy.special import stdtrit  # slow to import, and few commands need it

    numbers = np.array(values, dtype=np.float64)
    if not len(numbers) or not np.isfinite(numbers).all():
        raise ValueError(f"a mean needs one finite number or more: {list(values)}")
    mean, count = float(numbers.mean()), len(numbers)
    if count == 1:
        return mean, mean, mean
    half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2) * numbers.std(ddof=1) / math.sqrt(count))
    return mean, mean - half, mean + half


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the ends of its 95 % interval: (median, low, high).

    The ends are values: the same number is left out below and above, so that the interval holds
    the true median with at least 95 %, whatever the distribution is (David and Nagaraja, Order
    Statistics, section 7.1). The interval of five or fewer values is their range, which holds it
    with less. A miss is infinite, and so may be an end.

    Raises:
        ValueError: There are no values, or one is NaN.
    """
    if not len(values) or any(map(math.isnan, values)):
        raise ValueError(f"a median needs one number or more, and no NaN: {list(values)}")
    ordered, count = sorted(map(float, values)), len(values)

    def chance(index: int) -> float:
        """Return the chance that the true median is less than ``ordered[index]``."""
        # Then at most ``index`` values are less than the median, each with the chance 1/2.
        return math.fsum(math.comb(count, few) for few in range(index + 1)) / 2.0**count

    index = 0
    while chance(index + 1) <= (1 - CONFIDENCE) / 2:
        index += 1
    return statistics.median(ordered), ordered[index], ordered[-1 - index]


def median_run(setting: Setting) -> Run:
    """Return the run to draw: the one with the median time to target.

    The final metric decides between equal times. Of two middle runs it is the slower one.
    """

    def rank(run: Run) -> tuple[float, float, str]:
        return time_to_target_s(run), _badness(run), str(run.path)

    return sorted(setting.runs, key=rank)[len(setting.runs) // 2]


def row(setting: Setting) -> Row:
    """Return the line of ``setting`` in the result table."""
    runs = setting.runs
    steps = [steps_to_target(run) for run in runs]
    # NaN (diverged, or never evaluated) counts as the worst value. Otherwise the median would
    # depend on the position of the NaN in the list.
    badness = statistics.median(_badness(run) for run in runs)
    sign = -1.0 if runs[0].started.higher_is_better else 1.0
    return Row(
        task=setting.task,
        optimizer=setting.optimizer,
        seeds=len(runs),
        reached=sum(math.isfinite(count) for count in steps),
        has_target=target(runs[0]) is not None,
        steps=spread(steps),
        seconds=spread(time_to_target_s(run) for run in runs),
        final=sign * badness if math.isfinite(badness) else math.nan,
    )


def _badness(run: Run) -> float:
    """Return the final metric with its sign turned so that less is better; infinite for NaN."""
    value = final_metric(run)
    if math.isnan(value):
        return math.inf
    return -value if run.started.higher_is_better else value


HUGE = 1e30
"""Values of a diverged run beyond this limit are not drawn."""

CurvePoint = tuple[float, float, float]
"""Step, training seconds, value."""


def points(run: Run, *, metric: bool) -> list[CurvePoint]:
    """Return the points of the validation metric or of the training loss that can be drawn."""
    if metric:
        curve = metric_curve(run)
    else:
        curve = [(number(e.step), number(e.train_s), number(e.loss)) for e in run.trained]
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


# Parts of a run's environment that differ between any two runs and say nothing about speed.
OWN_TO_A_RUN = frozenset({"command", "slurm_job_id"})


def notes(settings: Sequence[Setting]) -> list[str]:
    """Return notes for readers of the table: failed runs, repeated seeds, other machines."""
    found = []
    for setting in settings:
        name = f"{setting.task}, {setting.optimizer}"
        for run in setting.runs:
            dead = status(run) not in ("reached", "finished") and target_reached(run) is None
            if dead:
                counts = "" if target(run) is None else ": counts as not reached"
                found.append(f"{name}: {plain(run.path.parent.name)} {_ending(run)}{counts}")
            gaps = [event for event in run.events if isinstance(event, RecordGap)]
            if gaps:
                where = f"before step {number(gaps[-1].step):.0f}"
                found.append(
                    f"{name}: the record of {plain(run.path.parent.name)} has a gap {where}"
                )
            elif lost := lost_events(run.path.parent):
                found.append(f"{name}: {plain(run.path.parent.name)}: {lost}")
        seeds = Counter(seed(run) for run in setting.runs)
        found += [f"{name}: seed {s} was run {n} times" for s, n in seeds.items() if n > 1]
    found += _clock_notes(settings)
    by_task: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for setting in settings:
        by_task[setting.task] += [flatten(run.started.environment) for run in setting.runs]
    for task, environments in by_task.items():
        if unequal := [k for k in differences(environments) if k not in OWN_TO_A_RUN]:
            found.append(f"{task}: the runs' environments differ in {', '.join(unequal)}")
    return found


def _clock_notes(settings: Sequence[Setting]) -> list[str]:
    """Return what the seconds are, if they are not time of day everywhere."""
    said = "seconds are processor time, not time of day (trainer.clock=cpu)"
    on_cpu = [s for s in settings if any(clock(run) == "cpu" for run in s.runs)]
    if on_cpu and len(on_cpu) == len(settings):
        return [said]
    # The seconds of two clocks cannot be compared, so the notes name the settings.
    return [f"{setting.task}, {setting.optimizer}: {said}" for setting in on_cpu]


def _ending(run: Run) -> str:
    if run.ended is None:
        return f"has not ended (last event at step {number(run.events[-1].step):.0f})"
    message = plain(run.ended.message)
    return f"ended as {status(run)}" + (f" ({message})" if message else "")
