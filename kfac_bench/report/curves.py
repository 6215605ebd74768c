"""Curves of runs as SVG text: the median seed as a bold line, the other seeds faint.

Equal events give equal bytes.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kfac_bench.record.runs import Run, Setting, clock, number, plain, target
from kfac_bench.record.score import (
    HUGE,
    drawable,
    median_run,
    points,
    target_reached,
    thin,
    worst_shown,
)
from kfac_bench.report.comparison import finding
from kfac_bench.report.figure_style import (
    INK,
    Style,
    our_look,
    say_cut,
    style_of,
    to_svg,
    use_log_heights,
)

MAX_POINTS = 400
"""Points of a curve; a reader cannot see more in a panel."""


@dataclass(frozen=True)
class Panel:
    """One diagram: the validation metric or the training loss, against seconds or steps."""

    metric: bool
    seconds: bool


_TITLE_LETTERS = 48
"""Letters in a line of a panel's title."""
MARGIN = 0.1
"""Margin of the y axis, which leaves room for the target's label."""
PANELS = (Panel(True, True), Panel(True, False), Panel(False, True), Panel(False, False))


def styles(settings: Sequence[Setting]) -> dict[str, Style]:
    """Return one style per optimizer label, the same in all tasks."""
    labels = dict.fromkeys(setting.optimizer for setting in settings)
    return {label: style_of(i) for i, label in enumerate(labels)}


def by_task(settings: Sequence[Setting]) -> list[tuple[str, list[Setting]]]:
    """Return each task with its settings. The settings are sorted by task, as from ``group``."""
    return [(task, list(found)) for task, found in groupby(settings, key=lambda s: s.task)]


def curves_svg(settings: Sequence[Setting]) -> str:
    """Draw four panels per task, metric and loss against seconds and steps, with a legend."""
    tasks = by_task(settings)
    drawn = styles(settings)
    with our_look():
        figure = Figure(figsize=(9.6, 6.4 * len(tasks) + 0.4), layout="constrained")
        grid = figure.subplots(2 * len(tasks), 2, squeeze=False)
        for i, (task, of_task) in enumerate(tasks):
            grid[2 * i][0].set_title(_title(task, of_task), loc="left")
            for k, panel in enumerate(PANELS):
                _draw(grid[2 * i + k // 2][k % 2], of_task, panel, drawn)
        _legend(figure, drawn, columns=4)
        return to_svg(figure)


def figure_svg(settings: Sequence[Setting]) -> str:
    """Draw the figure for a README: one panel per task, the metric against training seconds.

    The figure has few columns, so that its text can be read on a phone.
    """
    tasks = by_task(settings)
    drawn = styles(settings)
    columns = math.ceil(math.sqrt(len(tasks) / 2))
    rows = math.ceil(len(tasks) / columns)
    with our_look():
        figure = Figure(figsize=(5.6 * columns, 2.7 * rows + 0.4), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for axes, (task, of_task) in zip(grid, tasks, strict=False):
            axes.set_title(_title(task, of_task), loc="left")
            _draw(axes, of_task, PANELS[0], drawn)
        for axes in list(figure.axes)[len(tasks) :]:
            axes.remove()
        _legend(figure, drawn, columns=3 * columns)
        return to_svg(figure)


def _title(task: str, settings: Sequence[Setting]) -> str:
    """Return the title of a panel: the task, and what the panel shows."""
    found = finding(settings)
    # The finding names the target, which is the last part of the task.
    words = f"{plain(task).rpartition(', ')[0] or plain(task)}: {found}" if found else plain(task)
    return textwrap.fill(words, _TITLE_LETTERS)


def _draw(axes: Axes, settings: Sequence[Setting], panel: Panel, drawn: dict[str, Style]) -> None:
    """Draw every run of ``settings`` (one task) in ``axes``."""
    started = settings[0].runs[0].started
    curves: list[list[float]] = []
    for setting in settings:
        style = drawn[setting.optimizer]
        middle = median_run(setting)
        # The median run is drawn last, so that it lies on top.
        for run in sorted(setting.runs, key=lambda run: run is middle):
            curves.append(_draw_run(axes, run, panel, style, bold=run is middle))
    heights = [y for curve in curves for y in curve]
    goals: list[float] = []
    time = "processor time" if clock(settings[0].runs[0]) == "cpu" else "training time"
    axes.set_xlabel(f"{time} (seconds)" if panel.seconds else "training steps")
    axes.set_ylabel("training loss")
    if panel.metric:
        axes.set_ylabel(f"validation {plain(started.metric)}".replace("_", " "))
        goals = _draw_target(axes, settings[0].runs[0])
    axes.margins(y=MARGIN)
    axes.autoscale_view()
    axes.set_xlim(left=0)
    better_up = panel.metric and bool(started.higher_is_better)
    # Losses and errors fall by factors. A share such as accuracy does not.
    if heights and min(heights + goals) > 0 and not better_up:
        use_log_heights(axes)
    # What is worse leaves the panel: otherwise the other values could not be read.
    goal = goals[0] if goals else None
    worst = worst_shown(curves, higher_is_better=better_up, goal=goal)
    shown = [y for y in heights if (y >= worst if better_up else y <= worst)]
    if len(shown) < len(heights):
        _fit(axes, min(shown + goals), max(shown + goals))
    say_cut(axes)


def _fit(axes: Axes, low: float, high: float) -> None:
    """Set the range of the y axis, with the margins that matplotlib would add."""
    if axes.get_yscale() == "log":
        wider = (high / low) ** MARGIN
        axes.set_ylim(low / wider, high * wider)
    else:
        # Without a difference, such as one value that is the target, the value is in the middle.
        wider = (high - low or abs(high) or 1.0) * MARGIN
        axes.set_ylim(low - wider, high + wider)


def _draw_target(axes: Axes, run: Run) -> list[float]:
    """Draw the target as a dashed line; return its height, or [] if there is no target."""
    goal = target(run)
    if goal is None or abs(goal) > HUGE:
        return []
    axes.axhline(goal, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    # The label is beyond the line at its left end: no run begins there, but runs may end there.
    above = run.started.higher_is_better
    axes.annotate(
        f"target {goal:.12g}",
        (0.0, goal),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3 if above else -3),
        textcoords="offset points",
        ha="left",
        va="bottom" if above else "top",
        fontsize=9,
    )
    return [goal]


def _draw_run(axes: Axes, run: Run, panel: Panel, style: Style, *, bold: bool) -> list[float]:
    """Draw one run; return the heights of its points."""
    drawn = thin(points(run, metric=panel.metric), MAX_POINTS)
    x = 1 if panel.seconds else 0
    ys = [point[2] for point in drawn]
    width, alpha = (2.0, 1.0) if bold else (1.0, 0.4)
    axes.add_line(style.line([p[x] for p in drawn], ys, linewidth=width, alpha=alpha))
    event = target_reached(run)
    if panel.metric and bold and event is not None:
        met = (number(event.step), number(event.train_s), number(event.value))
        if drawable(met):
            axes.plot([met[x]], [met[2]], "o", color=style.colour, markersize=5)
    return ys


def _legend(figure: Figure, drawn: dict[str, Style], columns: int) -> None:
    handles = [style.line([], [], linewidth=2.0) for style in drawn.values()]
    # matplotlib leaves out labels that start with an underscore.
    labels = [plain(label).lstrip("_") or "?" for label in drawn]
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(columns, len(labels)),
        frameon=False,
        handlelength=2.6,
    )
