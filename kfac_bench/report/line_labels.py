"""Labels at the right ends of lines, so that no reader has to match colours with a legend."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from kfac_bench.report.figure_style import INK

_BETWEEN_PT = 13.0
"""Points between the middles of two labels."""


@dataclass(frozen=True)
class EndLabel:
    """The text for a line that ends at ``height`` (in data), and the colour of the line."""

    height: float
    text: str
    colour: str
    shift_pt: float = 0.0
    """How far the line is drawn above its data, in points."""


def label_ends(axes: Axes, labels: Sequence[EndLabel], axes_height_pt: float) -> None:
    """Write each label right of the axes, close to the end of its line. No two labels overlap.

    All lines must have been drawn, because the limits of the y axis are fixed here.
    ``axes_height_pt`` is the approximate height of the axes in points.
    """
    axes.set_ylim(axes.get_ylim())
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [
        (float(to_axes.transform((1.0, label.height))[1]) + label.shift_pt / axes_height_pt, label)
        for label in labels
    ]
    ends.sort(key=lambda end: end[0])
    places = spread([height for height, _ in ends], _BETWEEN_PT / axes_height_pt)
    for (height, label), place in zip(ends, places, strict=True):
        axes.annotate(
            label.text,
            (1.0, height),
            (1.06, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=INK,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": label.colour,
                "linewidth": 1.2,
                "relpos": (0.0, 0.5),
                "shrinkA": 0.0,
                "shrinkB": 1.0,
            },
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Return heights at least ``gap`` apart in [0, 1], as close to the given ones as possible.

    The given heights must be sorted. The sum of squared distances is least. This is an isotonic
    regression, made by pooling neighbours. Too many heights for the gap go below 0.
    """
    pools: list[tuple[float, int]] = []  # Sum and number of (height - its number * gap).
    for i, height in enumerate(heights):
        total, count = height - i * gap, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before, members = pools.pop()
            total, count = total + before, count + members
        pools.append((total, count))
    levels = [total / count for total, count in pools for _ in range(count)]
    highest = 1.0 - (len(heights) - 1) * gap
    return [min(max(level, 0.0), highest) + i * gap for i, level in enumerate(levels)]
