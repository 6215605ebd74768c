"""Curves of runs as SVG text: the median seed as a bold line, the other seeds faint.

The same events give the same bytes. Labels come from event files, so no text is read as math.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kfac_bench.record.runs import Run, Setting, number, plain, target
from kfac_bench.record.score import median_run, target_reached
from kfac_bench.record.series import HUGE, drawable, points, thin, worst_shown

# Okabe and Ito's palette, told apart with every common colour blindness, darkest first.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES: tuple[tuple[float, ...], ...] = ((), (4.0, 1.0), (1.0, 1.0), (5.0, 1.0, 1.0, 1.0))
INK, GRID, PAPER = "#24292f", "#d8dee5", "#ffffff"
LOOK: Any = {
    "text.parse_math": False,  # labels are not trusted: a $ is a dollar sign
    "svg.fonttype": "none",  # text stays text: small, searchable, read aloud
    "svg.hashsalt": "kfac_bench",  # equal bytes for equal events
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "figure.facecolor": PAPER,
    "savefig.facecolor": "auto",
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.1,
    "lines.solid_capstyle": "round",
}
MAX_POINTS = 400  # more cannot be seen in a panel


@dataclass(frozen=True)
class Style:
    """How an optimizer is drawn: ``index`` into :data:`PALETTE`, dash lengths (none: solid)."""

    index: int
    dashes: tuple[float, ...]

    @property
    def colour(self) -> str:
        """The colour as ``#rrggbb``."""
        return PALETTE[self.index]

    def line(self, xs: list[float], ys: list[float], **look: Any) -> Line2D:
        """Make a line of this style through the points."""
        line = Line2D(xs, ys, color=self.colour, **look)
        if self.dashes:
            line.set_dashes(self.dashes)
        return line


@dataclass(frozen=True)
class Panel:
    """One diagram: validation ``metric`` or training loss, against ``seconds`` or steps."""

    metric: bool
    seconds: bool


MARGIN = 0.1
"""Of the y axis: room for the target's label."""
PANELS = (Panel(True, True), Panel(True, False), Panel(False, True), Panel(False, False))


def styles(settings: Sequence[Setting]) -> dict[str, Style]:
    """One style per optimizer label, the same in all tasks."""
    labels = list(dict.fromkeys(setting.optimizer for setting in settings))
    size = len(PALETTE)
    return {
        label: Style(i % size, DASHES[i // size % len(DASHES)]) for i, label in enumerate(labels)
    }


def by_task(settings: Sequence[Setting]) -> list[tuple[str, list[Setting]]]:
    """Split settings (sorted by task, as ``group`` returns them) into those of each task."""
    return [(task, list(found)) for task, found in groupby(settings, key=lambda s: s.task)]


def curves_svg(settings: Sequence[Setting]) -> str:
    """All curves, for each task: metric and loss against seconds and steps, with a legend."""
    tasks = by_task(settings)
    drawn = styles(settings)
    with our_look():
        figure = Figure(figsize=(9.6, 6.4 * len(tasks) + 0.4), layout="constrained")
        grid = figure.subplots(2 * len(tasks), 2, squeeze=False)
        for i, (task, of_task) in enumerate(tasks):
            grid[2 * i][0].set_title(plain(task), loc="left")
            for k, panel in enumerate(PANELS):
                _draw(grid[2 * i + k // 2][k % 2], of_task, panel, drawn)
        _legend(figure, drawn, columns=4)
        return to_svg(figure)


def figure_svg(settings: Sequence[Setting]) -> str:
    """Draw the figure for a README: per task the metric against training seconds, on white."""
    tasks = by_task(settings)
    drawn = styles(settings)
    columns = min(3, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    with our_look():
        figure = Figure(figsize=(4.8 * columns, 3.3 * rows + 0.4), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for axes, (task, of_task) in zip(grid, tasks, strict=False):
            axes.set_title(plain(task), loc="left")
            _draw(axes, of_task, PANELS[0], drawn)
        for axes in list(figure.axes)[len(tasks) :]:
            axes.remove()
        _legend(figure, drawn, columns=2 * columns)
        return to_svg(figure)


def _draw(axes: Axes, settings: Sequence[Setting], panel: Panel, drawn: dict[str, Style]) -> None:
    """Draw every run of ``settings`` (one task) in ``axes``."""
    started = settings[0].runs[0].started
    curves: list[list[float]] = []
    for setting in settings:
        style = drawn[setting.optimizer]
        middle = median_run(setting)
        for run in sorted(setting.runs, key=lambda run: run is middle):  # last drawn, on top
            curves.append(_draw_run(axes, run, panel, style, bold=run is middle))
    heights = [y for curve in curves for y in curve]
    goals: list[float] = []
    axes.set_xlabel("training time (seconds)" if panel.seconds else "training steps")
    axes.set_ylabel("training loss")
    if panel.metric:
        axes.set_ylabel(f"validation {plain(started.metric)}".replace("_", " "))
        goals = _draw_target(axes, settings[0].runs[0])
    axes.margins(y=MARGIN)
    axes.autoscale_view()
    axes.set_xlim(left=0)
    # Losses and errors fall by factors; a share like accuracy does not.
    if heights and min(heights + goals) > 0 and not (panel.metric and started.higher_is_better):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    better_up = panel.metric and bool(started.higher_is_better)
    worst = worst_shown(curves, higher_is_better=better_up)
    shown = [y for y in heights if (y >= worst if better_up else y <= worst)]
    if len(shown) < len(heights):
        _fit(axes, min(shown + goals), max(shown + goals))


def _fit(axes: Axes, low: float, high: float) -> None:
    """The range of the y axis, with the margins that it has by itself."""
    if axes.get_yscale() == "log":
        wider = (high / low) ** MARGIN
        axes.set_ylim(low / wider, high * wider)
    else:
        wider = (high - low) * MARGIN
        axes.set_ylim(low - wider, high + wider)


def _draw_target(axes: Axes, run: Run) -> list[float]:
    """Draw the target as a dashed line; return its height, if it has one."""
    goal = target(run)
    if goal is None or abs(goal) > HUGE:
        return []
    axes.axhline(goal, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    # Beyond the line at its far end: most runs stop where they meet it.
    above = run.started.higher_is_better
    axes.annotate(
        f"target {goal:.12g}",
        (1.0, goal),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3 if above else -3),
        textcoords="offset points",
        ha="right",
        va="bottom" if above else "top",
        fontsize=9,
    )
    return [goal]


def _draw_run(axes: Axes, run: Run, panel: Panel, style: Style, *, bold: bool) -> list[float]:
    """Draw one run; return the heights of its points."""
    found = points(run, metric=panel.metric)
    if not panel.metric:
        found = [point for point in found if point[2] > 0]  # the axis is logarithmic
    found = thin(found, MAX_POINTS)
    x = 1 if panel.seconds else 0
    ys = [point[2] for point in found]
    width, alpha = (2.0, 1.0) if bold else (1.0, 0.4)
    axes.add_line(style.line([p[x] for p in found], ys, linewidth=width, alpha=alpha))
    event = target_reached(run)
    if panel.metric and bold and event is not None:
        met = (number(event.step), number(event.train_s), number(event.value))
        if drawable(met):
            axes.plot([met[x]], [met[2]], "o", color=style.colour, markersize=5)
    return ys


def _legend(figure: Figure, drawn: dict[str, Style], columns: int) -> None:
    handles = [style.line([], [], linewidth=2.0) for style in drawn.values()]
    # matplotlib leaves out labels that start with an underscore
    labels = [plain(label).lstrip("_") or "?" for label in drawn]
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(columns, len(labels)),
        frameon=False,
        handlelength=2.6,
    )


@contextmanager
def our_look() -> Iterator[None]:
    """Draw with our look whatever the user's matplotlibrc says."""
    with mpl.rc_context(), warnings.catch_warnings():
        # a label may use letters that the measuring font lacks; the browser has others
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        mpl.rcdefaults()
        mpl.rcParams.update(LOOK)
        yield


def to_svg(figure: Figure) -> str:
    """Write the figure as one ``<svg>`` element that refers to nothing outside of it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    # The document type and the metadata name URLs, and the metadata the date.
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    # ids would repeat where a page holds several figures; nothing refers to those of groups
    return re.sub(r'<g id="[^"<>]*">', "<g>", text)
