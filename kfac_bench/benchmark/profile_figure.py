"""The figure of performance profiles: share of tasks solved over the ratio to the best time."""

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from kfac_bench.benchmark.performance_profile import TAU_MAX, Times, profiles, scores
from kfac_bench.record.runs import plain
from kfac_bench.report.figure_style import our_look, style_of, to_svg


def profile_svg(times: Times, title: str = "", unit: str = "time") -> str:
    """Draw the profiles over tau in [1, 4]. The legend lists the scores, the best first.

    ``unit`` names what the times count: ``time`` or ``steps``.
    """
    score = scores(times)
    with our_look():
        figure = Figure(figsize=(7.6, 4.2), layout="constrained")
        axes = figure.subplots()
        for i, (name, profile) in enumerate(profiles(times).items()):
            style = style_of(i)
            # A profile is a step function: each corner adds a horizontal and a vertical piece.
            xs, ys = [1.0], [0.0]
            for tau, share in [(t, s) for t, s in profile if t <= TAU_MAX]:
                xs += [tau, tau]
                ys += [ys[-1], share]
            line = style.line([*xs, TAU_MAX], [*ys, ys[-1]], linewidth=2.0, alpha=0.9)
            line.set_label(f"{plain(name).lstrip('_') or '?'} ({score[name]:.2f})")
            line.set_clip_on(False)  # A line at 0 or 1 must look as thick as the others.
            axes.add_line(line)
        axes.set_title(plain(title), loc="left")
        axes.set_xlim(1.0, TAU_MAX)
        axes.set_ylim(0.0, 1.0)
        axes.xaxis.set_major_locator(MultipleLocator(0.5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.set_xlabel(f"tau: {unit} to target, over the best optimizer's")
        axes.set_ylabel(f"share of {len(times)} tasks solved")
        figure.legend(loc="outside right upper", frameon=False, title="score", handlelength=2.6)
        return to_svg(figure)
