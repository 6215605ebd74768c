"""The figure of performance profiles: share of tasks solved over the ratio to the best time."""

import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MultipleLocator
from matplotlib.transforms import ScaledTranslation

from kfac_bench.benchmark.performance_profile import TAU_MAX, Profile, Times, profiles, scores
from kfac_bench.output import listed
from kfac_bench.record.runs import plain
from kfac_bench.report.figure_style import PALETTE, REST, our_look, to_svg
from kfac_bench.report.line_labels import EndLabel, label_ends

_WIDTH_IN, _HEIGHT_IN, _AXES_PT = 6.4, 3.9, 190.0
_APART_PT = 1.9
"""Points between lines of equal height, which would hide each other."""


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
            shift_pt = _APART_PT * ((len(best) - 1) / 2 - i)
            line = _line(drawn[name], PALETTE[i], width=1.8)
            axes.add_line(line)
            shift = ScaledTranslation(0, shift_pt / 72, figure.dpi_scale_trans)
            line.set_transform(axes.transData + shift)
            ends.append(EndLabel(_share_at_end(drawn[name]), labels[name], PALETTE[i], shift_pt))
        label_ends(axes, ends, _AXES_PT)
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
    # The margins leave room for the lines that are drawn beside their true share.
    axes.set_ylim(-0.04, 1.04)
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
    return Line2D([*xs, TAU_MAX], [*ys, ys[-1]], color=colour, linewidth=width)


def _share_at_end(profile: Profile) -> float:
    return max((share for tau, share in profile if tau <= TAU_MAX), default=0.0)
