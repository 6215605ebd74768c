"""The tables and the figure of measured scaling: a step's stages, and efficiency over ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kfac_bench.benchmark.scaling.measured import (
    STAGES,
    ScalingPoint,
    efficiency,
    efficiency_finding,
    measure,
    over_first_order,
    step_finding,
)
from kfac_bench.record.runs import Run
from kfac_bench.report.figure_style import (
    INK,
    PALE,
    PALETTE,
    REST,
    EndLabel,
    dash_all_but_first,
    label_ends,
    our_look,
    say_cut,
    set_title,
    to_svg,
    use_powers_of_two,
)
from kfac_bench.report.tables import DASH, Table, Value


def tables(runs: Iterable[Run]) -> list[Table]:
    """Return the tables that these runs can fill.

    The table of efficiency needs several numbers of ranks. The table of stages needs K-FAC.
    """
    points = measure(runs)
    several = len({p.world_size for p in points}) > 1
    tables = [scaling_table(points)] if several else []
    return tables + ([stage_table(points)] if any(p.stages_s for p in points) else [])


def scaling_table(points: Sequence[ScalingPoint]) -> Table:
    """Return the step, throughput and efficiency of each strategy on each number of ranks.

    :func:`~kfac_bench.benchmark.scaling.measured.efficiency` defines the efficiency.
    """
    columns = (
        "task",
        "strategy",
        "ranks",
        "batch",
        "ms/step",
        "range",
        "examples/s",
        "efficiency, %",
        "x without K-FAC",
        "payload, MB",
    )
    rows: list[Sequence[Value]] = [
        (
            p.task,
            p.strategy,
            p.world_size,
            p.batch_size,
            1e3 * p.step_s,
            f"{1e3 * p.low_s:.4g} {DASH} {1e3 * p.high_s:.4g}",
            p.examples_per_s,
            _percent(efficiency(points, p)),
            over_first_order(points, p),
            p.payload_bytes / 1e6 if p.stages_s else None,
        )
        for p in points
    ]
    notes = [
        "efficiency: throughput per rank over that of the same strategy on its fewest ranks",
        "x without K-FAC: time of the step over that of the optimizer alone",
        "payload: mean bytes of K-FAC's messages per step",
        *_notes(points),
    ]
    return _table("Scaling, measured", points, columns, rows, notes)


def stage_table(points: Sequence[ScalingPoint]) -> Table:
    """Return the milliseconds of one run of each of K-FAC's stages (the paper's Fig. 7)."""
    kfac = [p for p in points if p.stages_s]
    columns = ("task", "strategy", "ranks", *STAGES, "mean of a step", "steps between")
    rows: list[Sequence[Value]] = []
    for p in kfac:
        stages_ms = [1e3 * p.stages_s[stage] * p.every[stage] for stage in STAGES]
        mean_ms = 1e3 * sum(p.stages_s.values())
        intervals = " / ".join(map(str, sorted(set(p.every.values()))))
        rows.append((p.task, p.strategy, p.world_size, *stages_ms, mean_ms, intervals))
    notes = [
        "milliseconds of one run of a stage; only the column of the mean divides by all steps; "
        "mean over ranks; waiting for a message belongs to the stage that sends the message",
        *_stage_shares(kfac),
        *_parts_of_intervals(kfac),
        *_notes(kfac),
    ]
    return _table("Stages of a K-FAC step, measured", kfac, columns, rows, notes)


def _table(
    title: str,
    points: Sequence[ScalingPoint],
    columns: Sequence[str],
    rows: Sequence[Sequence[Value]],
    notes: Sequence[str],
) -> Table:
    """Return the table. One task stands in the title; several tasks keep the first column."""
    tasks = list(dict.fromkeys(p.task for p in points))
    if len(tasks) > 1:
        return Table(title, columns, rows, notes)
    title += "".join(f": {task}" for task in tasks)
    return Table(title, columns[1:], [row[1:] for row in rows], notes)


def _stage_shares(points: Sequence[ScalingPoint]) -> list[str]:
    """Return the ratio that the paper states for Fig. 7, if both its strategies were measured."""
    notes = []
    for p in (p for p in points if p.strategy == "comm_opt" and p.world_size > 1):
        other = [q for q in points if (q.task, q.strategy) == (p.task, "layer_wise")]
        for q in (q for q in other if q.world_size == p.world_size):
            gradients = q.stages_s["gradient share"] * q.every["gradient share"]
            if gradients > 0:
                ratio = p.stages_s["their share"] * p.every["their share"] / gradients
                notes.append(
                    f"{p.world_size} ranks: sharing decompositions in comm_opt takes {ratio:.2g} "
                    f"times as long as sharing gradients in layer_wise (the paper, 64 V100: 3.4)"
                )
    return notes


def _parts_of_intervals(points: Sequence[ScalingPoint]) -> list[str]:
    """Return a note on points whose steps are no whole number of intervals."""
    odd = [p for p in points if p.steps % (p.rounds * math.lcm(*p.every.values()))]
    if not odd:
        return []
    which = ", ".join(f"{p.strategy} on {p.world_size}" for p in odd)
    return [
        f"not measured over whole intervals: {which}; rare stages count too often or too rarely"
    ]


def _notes(points: Sequence[ScalingPoint]) -> list[str]:
    notes = []
    if points:
        rounds, steps = _range(p.rounds for p in points), _range(p.steps for p in points)
        notes.append(
            f"medians of {rounds} rounds, {steps} steps per point, without the first window"
        )
    short = sorted({p.world_size for p in points if p.is_short_of_cores})
    if short:
        which = ", ".join(map(str, short))
        notes.append(f"{which} ranks share cores: their times do not hold for more machines")
    return notes


def _range(numbers: Iterable[int]) -> str:
    """Return ``3``, or ``3 to 5`` if the numbers differ."""
    ends = sorted(set(numbers))
    return str(ends[0]) if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"


def _percent(value: float) -> float | None:
    return None if math.isnan(value) else 100 * value


_STAGE_COLOURS = (*PALETTE, REST)
_NARROWEST_IN, _LINES_IN, _LINES_PT = 6.4, 3.2, 150.0
"""Inches of the figure's width and of the height of the panel of lines; points of its axes."""
_LETTERS = 62
"""Letters in a line of a title."""

Simulated = Mapping[str, Mapping[int, float]]
"""Simulated efficiency by strategy and number of ranks."""


def svg(points: Sequence[ScalingPoint], title: str, simulated: Simulated, where: str) -> str:
    """Draw the figure; equal points give equal bytes.

    Its panels are below each other, so that they can be read on a phone.

    Args:
        points: What was measured.
        title: What was measured, in words: the second line of the title of the bars.
        simulated: Efficiencies for the panel of lines, drawn as thin lines; {} for none.
        where: What the simulated lines are called.
    """
    with our_look():
        width = max(_NARROWEST_IN, 0.62 * len(points) + 1.6)
        figure = Figure(figsize=(width, 4.6 + _LINES_IN), layout="constrained")
        bars, lines = figure.subplots(2, 1, height_ratios=[4.6, _LINES_IN])
        set_title(bars, step_finding(points), title, _LETTERS)
        _bars(bars, points)
        _lines(lines, points, simulated)
        below = f"thin, with crosses: {where}" * bool(simulated)
        set_title(lines, efficiency_finding(points), below, _LETTERS)
        return to_svg(figure)


def _bars(axes: Axes, points: Sequence[ScalingPoint]) -> None:
    places = _places(points)
    bottom = [1e3 * p.rest_s for p in points]
    axes.bar(places, bottom, 0.8, color=PALE, label="all but K-FAC")
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
    axes.errorbar(places, tops, extent, fmt="none", color=INK, elinewidth=1.0, capsize=3)
    axes.set_xticks(places, [str(p.world_size) for p in points])
    for series in dict.fromkeys(p.series for p in points):
        mine = [x for x, p in zip(places, points, strict=True) if p.series == series]
        name = next(p.strategy for p in points if p.series == series)
        middle = (mine[0] + mine[-1]) / 2
        below: dict[str, Any] = {"xytext": (0, -18), "textcoords": "offset points"}
        place = ("data", "axes fraction")
        axes.annotate(name, (middle, 0), xycoords=place, ha="center", va="top", **below)
    axes.set_xlabel("ranks", labelpad=18)
    axes.set_ylabel("milliseconds per step")
    axes.grid(axis="x", visible=False)
    # Above the bars, because a legend over them would hide some.
    axes.set_ylim(top=1.3 * max(1e3 * p.high_s for p in points))
    axes.legend(loc="upper left", ncols=4, frameon=False, fontsize=8, handlelength=1.2)


def _places(points: Sequence[ScalingPoint]) -> list[float]:
    """Return the x position of each bar, with a gap where the strategy changes."""
    places: list[float] = []
    for i, p in enumerate(points):
        gap = 1.5 if i and points[i - 1].series != p.series else 1.0
        places.append(places[-1] + gap if places else 0.0)
    return places


def _lines(axes: Axes, points: Sequence[ScalingPoint], simulated: Simulated) -> None:
    use_powers_of_two(axes, "ranks", sorted({p.world_size for p in points}), str)
    axes.set_ylabel("scaling efficiency (%)")
    ends: list[EndLabel] = []
    drawn: list[float] = []
    for i, name in enumerate(dict.fromkeys(p.strategy for p in points)):
        mine = [p for p in points if p.strategy == name]
        # The strategies without K-FAC come first. They are grey, for comparison.
        colour = PALETTE[i % len(PALETTE)] if mine[0].every else REST
        shares = [100 * efficiency(points, p) for p in mine]
        (line,) = axes.plot([p.world_size for p in mine], shares, color=colour, marker="o")
        dash_all_but_first(line, i)
        ends.append(EndLabel(shares[-1], name, colour))
        drawn += shares
        if theirs := simulated.get(name):
            xs = sorted(theirs)
            ys = [100 * theirs[x] for x in xs]
            axes.plot(xs, ys, color=colour, linewidth=0.9, marker="x")
            drawn += ys
    _limit(axes, [share for share in drawn if math.isfinite(share)])
    say_cut(axes)
    label_ends(axes, [end for end in ends if math.isfinite(end.height)], _LINES_PT)


def _limit(axes: Axes, shares: Sequence[float]) -> None:
    """Let the y axis begin where the lines can be told apart."""
    low, high = min(shares, default=0.0), max(shares, default=100.0)
    margin = max(0.15 * (high - low), 2.0)
    axes.set_ylim(max(0.0, low - margin), high + margin)
