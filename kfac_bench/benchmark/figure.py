"""A benchmark's figure, drawn from the lines of its table: measured, computed and published.

Measured bars are full, with the interval of their seeds; computed ones are hatched; published ones
are outlines, and a published range is a grey band. A miss has no bar, but a cross at its foot.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

from kfac_bench.benchmark.result import Line, axes_of, how_computed
from kfac_bench.benchmark.schema import Benchmark, FigureSpec
from kfac_bench.report.figure_style import DASHES, GRID, INK, PALETTE, our_look, to_svg

QUANTITY = "quantity"
_HATCH = "////"


def svg(benchmark: Benchmark, lines: Sequence[Line]) -> str | None:
    """None where the benchmark has no figure, or no line that it is of."""
    drawing = benchmark.figure
    if drawing is None:
        return None
    mine = [line for line in lines if line.quantity in drawing.quantities]
    if not mine:
        return None
    colours = _values(benchmark, drawing.colour, mine)
    groups = [*dict.fromkeys(_panel(drawing, line) for line in mine)]
    with our_look():
        width = max(4.6, 1.3 + 1.1 * len(_values(benchmark, drawing.x, mine))) * len(groups)
        width = min(max(width, 6.4), 15.0)
        figure = Figure(figsize=(width, 4.1), layout="constrained")
        panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
        for axes, group in zip(panels, groups, strict=True):
            of = [line for line in mine if _panel(drawing, line) == group]
            draw = _lines if drawing.lines else _bars
            draw(axes, of, drawing, _values(benchmark, drawing.x, of), colours)
            axes.set_title(" ".join(value for _, value in group), loc="left")
        unit = next((line.unit for line in mine if line.unit), "")
        name = drawing.quantities[0] if len(drawing.quantities) == 1 else ""
        panels[0].set_ylabel(f"{name} ({unit})" if unit and name else name or unit)
        figure.legend(
            handles=list(_legend(benchmark, drawing, mine, colours)),
            loc="outside lower center",
            ncols=math.ceil(width / 2.3),
            frameon=False,
        )
        return to_svg(figure)


def _panel(drawing: FigureSpec, line: Line) -> tuple[tuple[str, str], ...]:
    """The point without what x and colours tell."""
    return tuple((a, v) for a, v in line.point.items() if a not in (drawing.x, drawing.colour))


def _values(benchmark: Benchmark, axis: str, lines: Sequence[Line]) -> list[str]:
    """Of an axis, those that the lines have, in order."""
    found = {_place(axis, line) for line in lines}
    order = [*benchmark.quantities] if axis == QUANTITY else axes_of(benchmark).get(axis, [""])
    return [value for value in order if value in found]


def _place(axis: str, line: Line) -> str:
    return line.quantity if axis == QUANTITY else line.point.get(axis, "")


def _shown(line: Line) -> Iterator[tuple[str, float]]:
    """What of the line is drawn: its kind and height."""
    if line.measured is not None:
        yield "measured", line.measured.median
    if line.computed is not None:
        yield "computed", line.computed
    if isinstance(line.published, float):
        yield "published", line.published


def _bars(
    axes: Axes,
    lines: Sequence[Line],
    drawing: FigureSpec,
    xs: Sequence[str],
    colours: Sequence[str],
) -> None:
    slots = [c for c in colours if drawing.colour != drawing.x] or [""]
    kinds = [
        k
        for k in ("measured", "computed", "published")
        if any(k == s for x in lines for s, _ in _shown(x))
    ]
    width = 0.8 / (len(slots) * max(1, len(kinds)))
    for line in lines:
        colour = PALETTE[colours.index(_place(drawing.colour, line)) % len(PALETTE)]
        slot = 0 if len(slots) == 1 else slots.index(_place(drawing.colour, line))
        left = xs.index(_place(drawing.x, line)) - 0.4 + slot * width * len(kinds)
        for kind, height in _shown(line):
            x = left + (kinds.index(kind) + 0.5) * width
            if not math.isfinite(height):
                axes.plot([x], [0], marker="x", color=colour, clip_on=False, zorder=3)
                continue
            look = {
                "measured": {"color": colour},
                "computed": {"facecolor": "none", "edgecolor": colour, "hatch": _HATCH},
                "published": {"facecolor": f"{colour}33", "edgecolor": INK, "linewidth": 1.2},
            }[kind]
            axes.bar(x, height, 0.92 * width, **look)  # type: ignore[arg-type]
            if kind == "measured" and line.measured is not None:
                _whisker(axes, x, line.measured.low, line.measured.high)
        if isinstance(line.published, tuple):
            low, high = line.published
            axes.fill_between([left, left + width * len(kinds)], low, high, color=GRID, zorder=0)
    axes.set_xticks(range(len(xs)), [_wrapped(x) for x in xs])
    axes.set_xlim(-0.6, len(xs) - 0.4)
    axes.set_xlabel("" if drawing.x == QUANTITY else drawing.x)
    axes.grid(False, axis="x")
    heights = [height for line in lines for _, height in _shown(line) if math.isfinite(height)]
    if heights and min(heights) > 0 and max(heights) < 1.6 * min(heights):
        span = max(max(heights) - min(heights), 0.02 * max(heights))
        axes.set_ylim(min(heights) - 1.2 * span, max(heights) + 0.4 * span)
        axes.annotate(
            "axis cut",
            (0, 0),
            (4, 3),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=8,
        )
    elif heights and min(heights) > 0 and max(heights) > 300 * min(heights):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _whisker(axes: Axes, x: float, low: float, high: float) -> None:
    if low != high and math.isfinite(low) and math.isfinite(high):
        axes.plot([x, x], [low, high], color=INK, linewidth=1.2)


def _lines(
    axes: Axes,
    lines: Sequence[Line],
    drawing: FigureSpec,
    xs: Sequence[str],
    colours: Sequence[str],
) -> None:
    for i, colour in enumerate(colours):
        mine = [line for line in lines if _place(drawing.colour, line) == colour]
        paint = PALETTE[i % len(PALETTE)]
        for kind, marker in (("measured", "o"), ("computed", ""), ("published", "D")):
            points = [
                (int(_place(drawing.x, line)), height)
                for line in mine
                for what, height in _shown(line)
                if what == kind and math.isfinite(height)
            ]
            if not points:
                continue
            (drawn,) = axes.plot(*zip(*points, strict=True), color=paint, marker=marker)
            if kind == "computed":
                drawn.set_dashes((4.0, 2.0))
            elif kind == "published":
                drawn.set(linestyle="none", markeredgecolor=INK, markersize=8, zorder=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(x) for x in xs], list(xs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(drawing.x)
    axes.set_ylim(bottom=0)


def _wrapped(words: str) -> str:
    """At spaces, in lines of about ten letters."""
    lines = [""]
    for word in words.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) > 10:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _legend(
    benchmark: Benchmark, drawing: FigureSpec, lines: Sequence[Line], colours: Sequence[str]
) -> Iterator[Patch | Line2D]:
    if drawing.colour != drawing.x:
        for i, colour in enumerate(colours):
            yield Patch(color=PALETTE[i % len(PALETTE)], label=colour)
    kinds = dict.fromkeys(itertools.chain.from_iterable((k for k, _ in _shown(x)) for x in lines))
    grey = "#8a939c"
    how = how_computed(benchmark)
    if "measured" in kinds:
        yield (
            Line2D([], [], color=grey, marker="o", label="measured")
            if drawing.lines
            else Patch(color=grey, label="measured (95 %)")
        )
    if "computed" in kinds:
        yield (
            Line2D([], [], color=grey, dashes=DASHES[1], label=how)
            if drawing.lines
            else Patch(facecolor="none", edgecolor=grey, hatch=_HATCH, label=how)
        )
    if "published" in kinds:
        yield (
            Line2D(
                [],
                [],
                color=grey,
                marker="D",
                linestyle="none",
                markeredgecolor=INK,
                label="published",
            )
            if drawing.lines
            else Patch(facecolor="none", edgecolor=INK, label="published")
        )
    if any(isinstance(line.published, tuple) for line in lines) and not drawing.lines:
        yield Patch(color=GRID, label="published range")
