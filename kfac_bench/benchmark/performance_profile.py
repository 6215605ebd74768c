"""Performance profiles of optimizers over tasks, and AlgoPerf's score.

The definitions are those of Dahl et al. 2023, "Benchmarking Neural Network Training Algorithms"
(profiles: Dolan & Moré 2002):

* On each task the ratio of an optimizer is r = t / best t.
* Its profile rho(tau) is the share of tasks with r <= tau.
* Its score is the area below the profile for tau in [1, 4], divided by the width. The best
  optimizer on each task has score 1. An optimizer has score 0 if it misses each target or takes at
  least four times the best time.

A time is infinite if the target was missed or the task was not run. All functions are pure.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MultipleLocator

from kfac_bench.output import listed
from kfac_bench.record.runs import Setting, option, plain, target
from kfac_bench.record.score import median_with_interval, steps_to_target, time_to_target_s
from kfac_bench.report.figure_style import (
    PALETTE,
    REST,
    EndLabel,
    dash_all_but_first,
    label_ends,
    our_look,
    to_svg,
)
from kfac_bench.report.tables import Table, Value

TAU_MAX = 4.0
"""The end of the score's area, as in AlgoPerf."""

KRONECKER = ("kl_shampoo", "kl_soap", "shampoo", "soap")
"""Optimizers with Kronecker factors, which are not first-order optimizers."""

Times = Mapping[str, Mapping[str, float]]
"""Task to optimizer to seconds (or steps) to target."""
Ratios = dict[str, dict[str, float]]
"""Optimizer to task to r."""
Profile = list[tuple[float, float]]
"""Corners of a step function: (tau, the share of tasks from tau on), with tau rising from 1."""


def medians(settings: Iterable[Setting], *, steps: bool = False) -> dict[str, dict[str, float]]:
    """Return the median seconds (or steps) to target of each setting that has a target."""
    measure = steps_to_target if steps else time_to_target_s
    times: dict[str, dict[str, float]] = {}
    for setting in settings:
        if target(setting.runs[0]) is not None:
            # A damaged clock may give a negative time, for which a ratio has no meaning.
            values = [max(0.0, measure(run)) for run in setting.runs]
            times.setdefault(setting.task, {})[setting.optimizer] = median(values)
    return times


def ratios(times: Times) -> Ratios:
    """Return r of each optimizer on each task; infinite for all on a task that none solved."""
    names = dict.fromkeys(name for row in times.values() for name in row)
    best = {task: min(row.values(), default=math.inf) for task, row in times.items()}
    return {
        name: {task: _ratio(row.get(name, math.inf), best[task]) for task, row in times.items()}
        for name in names
    }


def _ratio(time: float, best: float) -> float:
    if math.isinf(time):
        return math.inf
    if time == best:  # This includes 0 / 0.
        return 1.0
    return time / best if best > 0 else math.inf


def profiles(times: Times) -> dict[str, Profile]:
    """Return rho of each optimizer, sorted by score with the best first, then by name."""
    made = {name: _profile(list(r.values())) for name, r in ratios(times).items()}
    order = scores(times)
    return {name: made[name] for name in sorted(made, key=lambda n: (-order[n], n))}


def _profile(values: Sequence[float]) -> Profile:
    corners = sorted({1.0, *(v for v in values if math.isfinite(v))})
    return [(tau, sum(v <= tau for v in values) / len(values)) for tau in corners]


def scores(times: Times, end: float = TAU_MAX) -> dict[str, float]:
    """Return the scores. The area below rho is the mean over tasks of max(0, end - r)."""
    return {
        name: fmean(max(0.0, end - r) / (end - 1) for r in of_tasks.values())
        for name, of_tasks in ratios(times).items()
    }


def not_run(times: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return a note on each task that some optimizers did not run."""
    names = {name for row in times.values() for name in row}
    return [
        f"{task}: not run, counted as missed: {', '.join(sorted(names - row.keys()))}"
        for task, row in times.items()
        if names - row.keys()
    ]


def table(times: Times, title: str = "Performance profiles", unit: str = "time") -> Table:
    """Return a row per optimizer, the best first: its score, its solved tasks, r on each task.

    ``unit`` names what the times count: ``time`` or ``steps``.
    """
    ratio, score = ratios(times), scores(times)
    tasks = list(times)
    rows: list[list[Value]] = []
    for name in profiles(times):
        solved = sum(map(math.isfinite, ratio[name].values()))
        rows.append([name, score[name], solved, *(ratio[name][task] for task in tasks)])
    columns = ["optimizer", "score", "solved", *(f"r, {task}" for task in tasks)]
    note = (
        f"r: {unit} to target over that of the best optimizer; medians over seeds, inf if half "
        f"missed. Score: area below the profile for tau in [1, {TAU_MAX:g}], at most 1"
    )
    return Table(title, columns, rows, [note])


def _is_first_order(config: Mapping[str, Any]) -> bool:
    name = option(config, "optimizer", "name")
    return not option(config, "kfac", "enabled") and name not in KRONECKER


def times_table(settings: Sequence[Setting]) -> Table:
    """Return a row per setting with a target: its median steps and seconds, and their interval.

    The last column is the seconds over those of the task's best first-order optimizer, without
    K-FAC and not in :data:`KRONECKER`. The KL clip alone (``kfac.method=identity``) is a control,
    so it counts as K-FAC here. The column has no number where no such optimizer met the target.
    """
    seconds, steps = medians(settings), medians(settings, steps=True)
    first_order: dict[str, float] = {}
    for s in settings:
        if s.task in seconds and _is_first_order(s.runs[0].started.config):
            own = seconds[s.task][s.optimizer]
            first_order[s.task] = min(own, first_order.get(s.task, math.inf))
    rows: list[list[Value]] = []
    for s in settings:
        if s.task in seconds:
            times = [time_to_target_s(run) for run in s.runs]
            _, low, high = median_with_interval(times)
            best = first_order.get(s.task, math.inf)
            over = None if math.isinf(best) else _ratio(seconds[s.task][s.optimizer], best)
            reached = f"{sum(map(math.isfinite, times))} of {len(times)}"
            both = steps[s.task][s.optimizer], seconds[s.task][s.optimizer]
            rows.append([s.task, s.optimizer, reached, *both, low, high, over])
    columns = (
        "task",
        "optimizer",
        "reached",
        "steps",
        "seconds",
        "low",
        "high",
        "over first-order",
    )
    note = (
        "Medians over seeds; a missed target counts as inf. Low and high: 95 % interval "
        "of the seconds. Over first-order: seconds over those of the best optimizer without "
        "Kronecker factors (no K-FAC, Shampoo or SOAP)"
    )
    return Table("Time to target", columns, rows, [note])


_WIDTH_IN, _HEIGHT_IN, _AXES_PT = 6.4, 3.9, 190.0


def profile_svg(times: Times, unit: str = "time") -> str:
    """Draw the profiles over tau in [1, 4].

    The six optimizers with the best scores have colours and labels at their lines. The others are
    grey, and a line of text lists them.

    Args:
        times: Task to optimizer to time.
        unit: What the times count, such as ``seconds`` or ``steps``.
    """
    score = scores(times)
    labels = {name: f"{_name(name)} {score[name]:.2f}" for name in score}
    drawn = profiles(times)
    best, rest = list(drawn)[: len(PALETTE)], list(drawn)[len(PALETTE) :]
    with our_look():
        figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
        axes = figure.subplots()
        _prepare(axes, len(times), unit)
        axes.set_title(textwrap.fill(profile_finding(times), 60), loc="left")
        for name in rest:
            axes.add_line(_line(drawn[name], REST, width=1.0))
        ends = []
        for i, name in enumerate(best):
            line = _line(drawn[name], PALETTE[i], width=1.8)
            # Lines of equal height would hide each other.
            dash_all_but_first(line, i)
            axes.add_line(line)
            ends.append(EndLabel(_share_at_end(drawn[name]), labels[name], PALETTE[i]))
        # Labels of one height keep their order, and the best one belongs on top.
        label_ends(axes, ends[::-1], _AXES_PT)
        if rest:
            others = f"Grey: {', '.join(labels[name] for name in rest)}"
            figure.supxlabel(textwrap.fill(others, 90), x=0.01, ha="left", fontsize=8)
        return to_svg(figure)


def profile_finding(times: Times) -> str:
    """Return the sentence that names the best optimizers of the profiles; "" if there is none."""
    score = scores(times)
    names = list(profiles(times))
    if not names or score[names[0]] == 0:
        return ""
    first = [name for name in names if f"{score[name]:.2f}" == f"{score[names[0]]:.2f}"]
    rest = names[len(first) :]
    best = f"score ({score[names[0]]:.2f})"
    if len(first) > 1:
        return f"{listed([*map(_name, first)])} have the best {best}"
    if not rest:
        return f"{_name(first[0])} has the {best}"
    second = f"{_name(rest[0])} the second best ({score[rest[0]]:.2f})"
    return f"{_name(first[0])} has the best {best}, {second}"


def _name(optimizer: str) -> str:
    # matplotlib leaves out labels that start with an underscore.
    return plain(optimizer).lstrip("_") or "?"


def _prepare(axes: Axes, tasks: int, unit: str) -> None:
    axes.set_xlim(1.0, TAU_MAX)
    axes.set_ylim(0.0, 1.0)
    axes.yaxis.set_major_locator(MultipleLocator(0.2))
    axes.xaxis.set_major_locator(MultipleLocator(0.5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.set_xlabel(f"{unit} to target, over the task's best")
    axes.set_ylabel(f"share of {tasks} tasks solved")


def _line(profile: Profile, colour: str, width: float) -> Line2D:
    """Return the step function: each corner adds a horizontal and a vertical piece."""
    xs, ys = [1.0], [0.0]
    for tau, share in profile:
        if tau <= TAU_MAX:
            xs += [tau, tau]
            ys += [ys[-1], share]
    # Without clipping, a line at 0 or 1 has its whole width.
    return Line2D([*xs, TAU_MAX], [*ys, ys[-1]], color=colour, linewidth=width, clip_on=False)


def _share_at_end(profile: Profile) -> float:
    return max((share for tau, share in profile if tau <= TAU_MAX), default=0.0)
