"""The figure: seconds per step and scaling efficiency over ranks, a line per strategy."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from kfac_bench.curves import DASHES, PALETTE, our_look, to_svg
from kfac_bench.simulate.sweep import Cell, Variant, efficiency


def svg(cells: Sequence[Cell], title: str) -> str:
    """Draw it; equal cells give equal bytes."""
    variants = list(dict.fromkeys(cell.variant for cell in cells))
    with our_look():
        figure = Figure(figsize=(9.6, 4.0), layout="constrained")
        left, right = figure.subplots(1, 2)
        for i, each in enumerate(variants):
            mine = sorted((c for c in cells if c.variant == each), key=lambda c: c.world_size)
            ranks = [c.world_size for c in mine]
            _line(left, i, each, ranks, [c.step_s for c in mine])
            _line(right, i, each, ranks, [100 * efficiency(cells, c) for c in mine])
        left.set_ylabel("seconds per step (simulated)")
        left.set_yscale("log")
        left.yaxis.set_minor_formatter(NullFormatter())
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        left.set_title(title, loc="left")
        right.set_ylabel("scaling efficiency (%)")
        right.set_ylim(0, 105)
        for axes in (left, right):
            _ranks(axes, sorted({c.world_size for c in cells}))
        handles, labels = left.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False
        )
        return to_svg(figure)


def _line(axes: Axes, i: int, each: Variant, xs: list[int], ys: list[float]) -> None:
    (line,) = axes.plot(xs, ys, color=PALETTE[i % len(PALETTE)], label=each.label, linewidth=2.0)
    line.set_marker("o")
    line.set_markersize(4)
    dashes = DASHES[i // len(PALETTE) % len(DASHES)]
    if dashes:
        line.set_dashes(dashes)


def _ranks(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("ranks")
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
