"""A benchmark's figure, drawn from the lines of its table: measured, computed and published.

Measured bars are filled and show the interval of their seeds. Computed bars are hatched, published
bars are outlines, and a published range is a grey band. A missed target has no bar or point, but a
cross. An arrow shows an interval without an end, because some seeds missed the target. If another
model ran than the paper's, its numbers have panels with a scale of their own.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from kfac_bench.benchmark.figure_finding import (
    KINDS,
    QUANTITY,
    figure_finding,
    heights,
    value_on,
    word_of_measured,
)
from kfac_bench.benchmark.result import Line, axes_of, how_computed
from kfac_bench.benchmark.schema import Benchmark, FigureSpec
from kfac_bench.record.runs import plain
from kfac_bench.report.figure_style import (
    DASHES,
    GRID,
    INK,
    PALETTE,
    REST,
    EndLabel,
    label_ends,
    our_look,
    say_cut,
    to_svg,
    use_powers_of_two,
)

_HATCH = "////"
_RANGE = "published range"
"""A kind of numbers that is drawn as a band instead of a bar."""
_LINES_PT = 150.0
"""Approximate height of a panel of lines, in points."""
_LETTERS_PER_IN, _TITLE_LINE_IN = 12.0, 0.18
"""Letters in an inch of the title, and the height of one of its lines."""


def svg(benchmark: Benchmark, lines: Sequence[Line], ran: str = "") -> str | None:
    """Draw the figure; None if the benchmark has no figure, or no line belongs to its figure.

    The title states the finding and the subject. Panels beside each other share their scale.

    Args:
        benchmark: The table or figure.
        lines: The lines of the table.
        ran: What ran in place of the paper's model and data; empty: what the paper ran.
    """
    spec = benchmark.figure
    if spec is None:
        return None
    # A published number may belong to no point of the figure.
    mine = [
        line
        for line in lines
        if line.quantity in spec.quantities
        and all(axis == QUANTITY or axis in line.point for axis in (spec.x, spec.colour))
    ]
    if not mine:
        return None
    colours = _values(benchmark, spec.colour, mine)
    rows = _rows(mine, ran)
    groups = max(len(_groups(spec, _of_kinds(mine, kinds))) for kinds in rows.values())
    # Panels of lines need no common height, so they are below each other, as a phone shows them.
    columns = 1 if spec.lines else groups
    with our_look():
        width = max(4.6, 1.3 + 1.1 * len(_values(benchmark, spec.x, mine))) * columns
        width = min(max(width, 6.4), 15.0)
        title = _title(benchmark, mine, ran, width)
        height = 1.3 + 2.8 * len(rows) * groups / columns
        height += _TITLE_LINE_IN * (1 + title.count("\n"))
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        down = len(rows) * groups // columns
        panels = figure.subplots(down, columns, squeeze=False, sharey="row")
        panels = panels.reshape(len(rows), groups)
        for (subject, kinds), in_row in zip(rows.items(), panels, strict=True):
            _draw_row([*in_row], benchmark, mine, subject, kinds)
        figure.legend(
            handles=[
                *(() if spec.lines else _colour_legend(spec, colours)),
                *_kind_legend(benchmark, spec, mine),
            ],
            loc="outside lower center",
            ncols=math.ceil(width / 2.3),
            frameon=False,
        )
        return to_svg(figure)


def _draw_row(
    panels: Sequence[Axes],
    benchmark: Benchmark,
    lines: Sequence[Line],
    subject: str,
    kinds: Sequence[str],
) -> None:
    spec = benchmark.figure
    assert spec is not None
    colours = _values(benchmark, spec.colour, lines)
    unit = next((line.unit for line in lines if line.unit), "")
    lines = _of_kinds(lines, kinds)
    groups = _groups(spec, lines)
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    for axes, group in zip(panels, groups, strict=False):
        of_group = [line for line in lines if _panel(spec, line) == group]
        xs = _values(benchmark, spec.x, of_group)
        if spec.lines:
            ends = _lines(axes, of_group, spec, xs, colours, kinds)
            _scale_lines(axes, _drawn(lines, kinds))
            label_ends(axes, ends, _LINES_PT)
        else:
            _bars(axes, of_group, spec, xs, colours, kinds)
        words = [subject, " ".join(value for _, value in group)]
        axes.set_title(": ".join(filter(None, words)), loc="left")
    if not spec.lines:  # The numbers of all panels decide the range of their axes.
        intervals = [line.measured for line in lines if line.measured and "measured" in kinds]
        limits = [x for each in intervals for x in (each.low, each.high) if math.isfinite(x)]
        _scale(panels[0], _drawn(lines, kinds), limits)
    name = spec.quantities[0] if len(spec.quantities) == 1 else ""
    label = f"{name} ({unit})" if unit and name not in ("", unit) else name or unit
    for axes in panels if spec.lines else panels[:1]:
        axes.set_ylabel(label)


def _rows(lines: Sequence[Line], ran: str) -> dict[str, Sequence[str]]:
    """Return the kinds of numbers in each row of panels, by the row's title.

    Numbers of another model and other data have a scale of their own.
    """
    kinds = _kinds(lines)
    if not ran or "measured" not in kinds or kinds == ["measured"]:
        return {"": kinds}
    return {"the paper's model": kinds[1:], plain(ran): ["measured"]}


def _title(benchmark: Benchmark, lines: Sequence[Line], ran: str, width_in: float) -> str:
    letters = int(_LETTERS_PER_IN * width_in)
    parts = [figure_finding(benchmark, lines, ran), benchmark.title]
    if benchmark.figure is not None and benchmark.figure.lines and parts[0]:
        parts.pop()  # The panels of lines name their subjects.
    return "\n".join(textwrap.fill(part, letters) for part in parts if part)


def _groups(spec: FigureSpec, lines: Sequence[Line]) -> list[tuple[tuple[str, str], ...]]:
    return [*dict.fromkeys(_panel(spec, line) for line in lines)]


def _panel(spec: FigureSpec, line: Line) -> tuple[tuple[str, str], ...]:
    """Return the line's point without the axes that x and the colours show."""
    return tuple((a, v) for a, v in line.point.items() if a not in (spec.x, spec.colour))


def _values(benchmark: Benchmark, axis: str, lines: Sequence[Line]) -> list[str]:
    """Return the values of an axis that the lines have, in the order of the axis."""
    there = {value_on(axis, line) for line in lines}
    order = [*benchmark.quantities] if axis == QUANTITY else axes_of(benchmark).get(axis, [""])
    return [value for value in order if value in there]


def _kinds(lines: Sequence[Line]) -> list[str]:
    there = {kind for line in lines for kind, _ in heights(line)}
    there |= {_RANGE for line in lines if isinstance(line.published, tuple)}
    return [kind for kind in (*KINDS, _RANGE) if kind in there]


def _of_kinds(lines: Sequence[Line], kinds: Sequence[str]) -> list[Line]:
    """Return the lines that have a number of one of these kinds; all lines if none has one."""
    return [line for line in lines if {*_kinds([line])} & {*kinds}] or [*lines]


def _drawn(lines: Sequence[Line], kinds: Sequence[str]) -> list[float]:
    """Return the finite heights of some kinds."""
    return [h for x in lines for kind, h in heights(x) if kind in kinds and math.isfinite(h)]


def _bars(
    axes: Axes,
    lines: Sequence[Line],
    spec: FigureSpec,
    xs: Sequence[str],
    colours: Sequence[str],
    kinds: Sequence[str],
) -> None:
    # A group of bars for each x: a slot for each colour, and in a slot a bar for each kind.
    slots = [c for c in colours if spec.colour != spec.x] or [""]
    bars = [kind for kind in kinds if kind != _RANGE]
    width = 0.8 / (len(slots) * max(1, len(bars)))
    for line in lines:
        name = value_on(spec.colour, line)
        colour = PALETTE[colours.index(name) % len(PALETTE)]
        slot = 0 if len(slots) == 1 else slots.index(name)
        left = xs.index(value_on(spec.x, line)) - 0.4 + slot * width * len(bars)
        for kind, height in heights(line):
            if kind in bars:
                x = left + (bars.index(kind) + 0.5) * width
                _bar(axes, line, kind, (x, height), width, colour)
        if isinstance(line.published, tuple) and _RANGE in kinds:
            low, high = line.published
            axes.fill_between(
                [left, left + width * max(1, len(bars))], low, high, color=GRID, zorder=0
            )
    axes.set_xticks(range(len(xs)), [_wrapped(x) for x in xs])
    axes.set_xlim(-0.6, len(xs) - 0.4)
    axes.set_xlabel("" if spec.x == QUANTITY else spec.x)
    axes.grid(False, axis="x")


def _bar(
    axes: Axes, line: Line, kind: str, top: tuple[float, float], width: float, colour: str
) -> None:
    """Draw one bar with its interval, or a cross for a missed target."""
    x, height = top
    if not math.isfinite(height):
        _cross(axes, x, colour)
        return
    looks: dict[str, dict[str, Any]] = {
        "measured": {"color": colour},
        "computed": {"facecolor": "none", "edgecolor": colour, "hatch": _HATCH},
        "published": {"facecolor": f"{colour}33", "edgecolor": INK, "linewidth": 1.2},
    }
    axes.bar(x, height, 0.92 * width, **looks[kind])
    if kind == "measured" and line.measured is not None:
        low, high = line.measured.low, line.measured.high
        ends = [end if math.isfinite(end) else height for end in (low, high)]
        if low != high:
            axes.plot([x, x], ends, color=INK, linewidth=1.2)
        # Some seeds missed the target, so the interval has no end on this side.
        for end, arrow in ((low, "v"), (high, "^")):
            if math.isinf(end):
                axes.plot([x], [height], arrow, color=INK, markersize=5)


def _cross(axes: Axes, x: float, colour: str) -> None:
    """Draw a missed target."""
    # At the bottom of the panel: the axis may be cut or logarithmic, and then lacks the zero.
    at_bottom = axes.get_xaxis_transform()
    axes.plot([x], [0], "x", color=colour, transform=at_bottom, clip_on=False, zorder=3)


def _scale(axes: Axes, heights: Sequence[float], ends: Sequence[float]) -> None:
    """Cut the y axis if all bars are about equal; make it logarithmic if they differ a lot.

    ``ends`` are those of the intervals, which must not be cut.
    """
    if len(heights) < 2 or min(heights) <= 0:
        return
    low, high = min(heights), max(heights)
    if high < 1.6 * low:
        low, high = min([low, *ends]), max([high, *ends])
        span = max(high - low, 0.02 * high)
        axes.set_ylim(max(0.0, low - 1.2 * span), high + 0.4 * span)
        say_cut(axes)
    elif high > 300 * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _scale_lines(axes: Axes, heights: Sequence[float]) -> None:
    """Let the y axis begin close to the lowest point, so that lines can be told apart."""
    low, high = min(heights, default=0.0), max(heights, default=1.0)
    margin = 0.08 * max(high - low, 0.02 * high)
    axes.set_ylim(max(0.0, low - margin), high + margin)
    say_cut(axes)


def _lines(
    axes: Axes,
    lines: Sequence[Line],
    spec: FigureSpec,
    xs: Sequence[str],
    colours: Sequence[str],
    kinds: Sequence[str],
) -> list[EndLabel]:
    """Draw the lines; return a label for the end of each one."""
    ends: list[EndLabel] = []
    for i, name in enumerate(colours):
        mine = [line for line in lines if value_on(spec.colour, line) == name]
        paint = PALETTE[i % len(PALETTE)]
        for kind, marker in (("measured", "o"), ("computed", ""), ("published", "D")):
            every = [
                (int(value_on(spec.x, line)), height)
                for line in mine
                for what, height in heights(line)
                if what == kind and kind in kinds
            ]
            for x, height in every:
                if math.isinf(height):
                    _cross(axes, x, paint)
            points = [point for point in every if math.isfinite(point[1])]
            if not points:
                continue
            (drawn,) = axes.plot(*zip(*points, strict=True), color=paint, marker=marker)
            if name not in [end.text for end in ends]:
                ends.append(EndLabel(points[-1][1], name, paint))
            if kind == "computed":
                # Dashes of lines that lie on one another fall into the gaps of the others.
                drawn.set_linestyle((3.0 * i, (3.0, 3.0 * (len(colours) - 1) or 2.0)))
            elif kind == "published":
                drawn.set(linestyle="none", markeredgecolor=INK, markersize=8, zorder=4)
    use_powers_of_two(axes, spec.x, [int(x) for x in xs], str)
    return ends


def _wrapped(words: str) -> str:
    """Break the text at spaces, into lines of about ten letters."""
    lines = [""]
    for word in words.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) > 10:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _colour_legend(spec: FigureSpec, colours: Sequence[str]) -> Iterator[Patch]:
    if spec.colour != spec.x:
        for i, name in enumerate(colours):
            yield Patch(color=PALETTE[i % len(PALETTE)], label=name)


def _kind_legend(
    benchmark: Benchmark, spec: FigureSpec, lines: Sequence[Line]
) -> Iterator[Patch | Line2D]:
    """Yield what full, hatched and outlined bars (or the lines) stand for."""
    grey, how, ours = REST, how_computed(benchmark), word_of_measured(lines)
    as_lines: dict[str, dict[str, Any]] = {
        "measured": {"marker": "o", "label": ours},
        "computed": {"dashes": DASHES[1], "label": how},
        "published": {"marker": "D", "linestyle": "none", "markeredgecolor": INK},
    }
    as_bars: dict[str, dict[str, Any]] = {
        "measured": {"color": grey, "label": f"{ours} (95 %)"},
        "computed": {"facecolor": "none", "edgecolor": grey, "hatch": _HATCH, "label": how},
        "published": {"facecolor": "none", "edgecolor": INK},
    }
    for kind in _kinds(lines):
        if kind == _RANGE:
            if not spec.lines:
                yield Patch(color=GRID, label=_RANGE)
        elif spec.lines:
            yield Line2D([], [], color=grey, **{"label": kind, **as_lines[kind]})
        else:
            yield Patch(**{"label": kind, **as_bars[kind]})
