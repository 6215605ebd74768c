"""The figure of measured scaling: a step's stages as stacked bars, and efficiency over ranks."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kfac_bench.benchmark.scaling.measured import STAGES, ScalingPoint, efficiency
from kfac_bench.report.figure_style import (
    INK,
    PALETTE,
    dash_all_but_first,
    our_look,
    to_svg,
    use_powers_of_two,
)

REST = "#c3cad2"
"""Colour of the part of a step that is not K-FAC."""
_STAGE_COLOURS = (*PALETTE, "#7f7f7f")

Simulated = Mapping[str, Mapping[int, float]]
"""Simulated efficiency by strategy and number of ranks."""


def svg(points: Sequence[ScalingPoint], title: str, simulated: Simulated, where: str) -> str:
    """Draw the figure; equal points give equal bytes.

    Args:
        points: What was measured.
        title: Title of the left panel, the stacked bars.
        simulated: Efficiencies for the right panel, drawn as thin lines; {} for none.
        where: What the simulated lines are called.
    """
    with our_look():
        width = 4.8 + max(4.0, 0.62 * len(points) + 1.6)
        figure = Figure(figsize=(width, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[width - 4.8, 4.8])
        left.set_title(title, loc="left")
        _bars(left, points)
        _lines(right, points, simulated, where)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        return to_svg(figure)


def _bars(axes: Axes, points: Sequence[ScalingPoint]) -> None:
    places = _places(points)
    bottom = [1e3 * p.rest_s for p in points]
    axes.bar(places, bottom, 0.8, color=REST, label="all but K-FAC")
    for i, stage in enumerate(STAGES):
        heights = [1e3 * p.stages_s.get(stage, 0.0) for p in points]
        if any(heights):
            axes.bar(places, heights, 0.8, bottom, color=_STAGE_COLOURS[i], label=stage)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    # The whisker reaches from the fastest round to the slowest.
    extent = [
        [1e3 * (p.step_s - p.low_s) for p in points],
        [1e3 * (p.high_s - p.step_s) for p in points],
    ]
    tops = [1e3 * p.step_s for p in points]
    axes.errorbar(places, tops, extent, fmt="none", ecolor=INK, elinewidth=1.0, capsize=3)
    axes.set_xticks(places, [str(p.world_size) for p in points])
    for series in dict.fromkeys(p.series for p in points):
        mine = [x for x, p in zip(places, points, strict=True) if p.series == series]
        name = next(p.strategy for p in points if p.series == series)
        below = ("data", "axes fraction")
        middle = (mine[0] + mine[-1]) / 2
        axes.annotate(name, (middle, -0.11), xycoords=below, ha="center", va="top")
    axes.set_xlabel("ranks", labelpad=20)
    axes.set_ylabel("milliseconds per step")
    axes.grid(axis="x", visible=False)


def _places(points: Sequence[ScalingPoint]) -> list[float]:
    """Return the x position of each bar, with a gap where the strategy changes."""
    places: list[float] = []
    for i, p in enumerate(points):
        gap = 1.5 if i and points[i - 1].series != p.series else 1.0
        places.append(places[-1] + gap if places else 0.0)
    return places


def _lines(axes: Axes, points: Sequence[ScalingPoint], simulated: Simulated, where: str) -> None:
    for i, name in enumerate(dict.fromkeys(p.strategy for p in points)):
        mine = [p for p in points if p.strategy == name]
        ranks = [p.world_size for p in mine]
        colour = PALETTE[i % len(PALETTE)]
        shares = [100 * efficiency(points, p) for p in mine]
        (line,) = axes.plot(ranks, shares, "o", color=colour, linestyle="-", label=name)
        dash_all_but_first(line, i)
        if theirs := simulated.get(name):
            xs = sorted(theirs)
            axes.plot(xs, [100 * theirs[x] for x in xs], color=colour, linewidth=0.9, marker="x")
    axes.set_title("scaling efficiency" + (f"; thin: {where}" if simulated else ""), loc="left")
    axes.set_ylabel("%")
    axes.set_ylim(0, 110)
    use_powers_of_two(axes, "ranks", sorted({p.world_size for p in points}), str)
    axes.legend(frameon=False, handlelength=2.6, fontsize=9)
