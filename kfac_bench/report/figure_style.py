"""The look of all figures, and the labels at the right ends of their lines."""

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""The palette of Okabe and Ito, darkest first. Colour-blind readers can tell its colours apart."""
DASHES: tuple[tuple[float, ...], ...] = ((), (4.0, 1.0), (1.0, 1.0), (5.0, 1.0, 1.0, 1.0))
INK, GRID = "#24292f", "#d8dee5"
REST, PALE = "#8a939c", "#c3cad2"
"""Grey lines and grey areas: what a figure shows only for comparison."""
IN_THE_DARK = {
    INK: "#e6edf3",
    GRID: "#30363d",
    REST: "#7d8590",
    PALE: "#4a535d",
    "#0072b2": "#58aee8",
    "#d55e00": "#f5894a",
    "#009e73": "#3ecf9f",
    "#cc79a7": "#e79bc5",
    "#e69f00": "#f0b93a",
    "#56b4e9": "#8fd3f7",
}
"""The colours of a figure on a dark page. The background of a figure is transparent."""
LOOK: Any = {
    # Labels come from event files and are not trusted: a $ is a dollar sign, no formula.
    "text.parse_math": False,
    # Text stays text: it is small, it can be searched, and a screen reader can read it.
    "svg.fonttype": "none",
    # A fixed salt gives equal bytes for equal events.
    "svg.hashsalt": "kfac_bench",
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
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "auto",
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.1,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Style:
    """The style of an optimizer: ``index`` into :data:`PALETTE`, and dash lengths (none: solid)."""

    index: int
    dashes: tuple[float, ...]

    @property
    def colour(self) -> str:
        """The colour as ``#rrggbb``."""
        return PALETTE[self.index]

    def line(self, xs: list[float], ys: list[float], **look: Any) -> Line2D:
        """Return a line of this style through the points."""
        line = Line2D(xs, ys, color=self.colour, **look)
        if self.dashes:
            line.set_dashes(self.dashes)
        return line


def style_of(index: int) -> Style:
    """Return the style of the setting with this number. All colours are used before a dash."""
    return Style(index % len(PALETTE), DASHES[index // len(PALETTE) % len(DASHES)])


def dash_all_but_first(line: Line2D, index: int) -> None:
    """Dash the line with this number: lines may lie on top of each other, and dashes show both."""
    if index:
        line.set_dashes(DASHES[1 + index % (len(DASHES) - 1)])


def set_title(axes: Axes, finding: str, subject: str, letters: int) -> None:
    """Write the finding and below it what the axes show, in lines of so many letters."""
    lines = [textwrap.fill(line, letters) for line in (finding, subject) if line]
    axes.set_title("\n".join(lines), loc="left")


def use_log_heights(axes: Axes) -> None:
    """Make the y axis logarithmic, with ticks at 1, 2 and 5 times the powers of ten."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def use_powers_of_two(
    axes: Axes, label: str, ticks: Sequence[float], write: Callable[[float], str]
) -> None:
    """Make the x axis logarithmic to base 2, with a tick at each given value and no other."""
    axes.set_xscale("log", base=2)
    axes.set_xlabel(label)
    axes.set_xticks(ticks, [write(x) for x in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def say_cut(axes: Axes) -> None:
    """Say where the y axis begins, if it begins far above zero. Its limits must be final."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "linear" and low > 0.1 * (high - low):
        where: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
        axes.annotate(f"axis from {low:.3g}", (0, 0), (4, 3), fontsize=8, **where)


@contextmanager
def our_look() -> Iterator[None]:
    """Draw with the look of this package, whatever the user's matplotlibrc says."""
    with mpl.rc_context(), warnings.catch_warnings():
        # A label may have letters that the measuring font lacks. The browser's font has them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        mpl.rcdefaults()
        mpl.rcParams.update(LOOK)
        yield


def to_svg(figure: Figure) -> str:
    """Return the figure as one ``<svg>`` element that refers to nothing outside of itself.

    The figure is transparent, and its colours follow the light or dark mode of the page.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    # The document type and the metadata name URLs, and the metadata also the date.
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    text = text.replace("</style>", f"{dark_rules()}</style>", 1)
    # Ids would repeat on a page with several figures. Nothing refers to the ids of groups.
    return re.sub(r'<g id="[^"<>]*">', "<g>", text)


def dark_rules() -> str:
    """Return the style rules by which a figure changes its colours in dark mode."""
    # matplotlib writes colours into style attributes, and only !important wins over these. Viewers
    # that do not know the rules show the figure in its light colours.
    rules = [
        f'[style*="{part}: {light}"]{{{part}: {dark} !important}}'
        for light, dark in IN_THE_DARK.items()
        for part in ("fill", "stroke")
    ]
    return f"@media (prefers-color-scheme: dark){{{''.join(rules)}}}"


_BETWEEN_PT = 13.0
"""Points between the middles of two labels."""


@dataclass(frozen=True)
class EndLabel:
    """The text for a line that ends at ``height`` (in data), and the colour of the line."""

    height: float
    text: str
    colour: str


def label_ends(axes: Axes, labels: Sequence[EndLabel], axes_height_pt: float) -> None:
    """Write each label right of the axes, close to the end of its line. No two labels overlap.

    All lines must have been drawn, because the limits of the y axis are fixed here.
    ``axes_height_pt`` is the approximate height of the axes in points.
    """
    axes.set_ylim(axes.get_ylim())
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [(float(to_axes.transform((1.0, label.height))[1]), label) for label in labels]
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
