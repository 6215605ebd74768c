"""The figure of a sweep: seconds per step and scaling efficiency over the number of ranks."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kfac_bench.report.figure_style import (
    PALETTE,
    dash_all_but_first,
    our_look,
    to_svg,
    use_log_heights,
    use_powers_of_two,
)
from kfac_bench.simulate.sweep import SimulatedCell, Variant, efficiency


def svg(cells: Sequence[SimulatedCell], title: str, examples: int | None = None) -> str:
    """Draw the figure; equal cells give equal bytes. An epoch has ``examples``, if known.

    A strategy with three fractions or more gets a third panel, which compares its fractions.
    """
    swept = _fractions(cells)
    whole = [cell for cell in cells if cell not in swept]
    with our_look():
        figure = Figure(figsize=(13.8 if swept else 9.6, 4.0), layout="constrained")
        left, right, *third = figure.subplots(1, 3 if swept else 2)
        variants = list(dict.fromkeys(cell.variant for cell in whole))
        for i, each in enumerate(variants):
            mine = sorted((c for c in whole if c.variant == each), key=lambda c: c.world_size)
            ranks = [c.world_size for c in mine]
            _line(left, i, each.label, ranks, [1e3 * c.step_s for c in mine])
            shares = [100 * efficiency(cells, c, examples) for c in mine]
            _line(right, i, each.label, ranks, shares)
        left.set_title(f"{title}, simulated", loc="left")
        left.set_ylabel("milliseconds per step")
        use_log_heights(left)
        right.set_ylabel("scaling efficiency (%)")
        right.set_ylim(0, 105)
        for axes in (left, right):
            use_powers_of_two(axes, "ranks", sorted({c.world_size for c in cells}), "{:,}".format)
        left.legend(frameon=False, handlelength=2.6)
        for axes in third:
            _by_fraction(axes, swept)
        return to_svg(figure)


def _fractions(cells: Sequence[SimulatedCell]) -> list[SimulatedCell]:
    """Return the cells of strategies that were simulated with three fractions or more."""
    found = [cell for cell in cells if cell.variant.fraction is not None]
    shares = {strategy: set[Variant]() for strategy in {c.variant.strategy for c in found}}
    for cell in found:
        shares[cell.variant.strategy].add(cell.variant)
    return [cell for cell in found if len(shares[cell.variant.strategy]) >= 3]


def _by_fraction(axes: Axes, cells: Sequence[SimulatedCell]) -> None:
    """Draw what K-FAC adds to a step, relative to the best fraction: a line per number of ranks."""
    strategy = cells[0].variant.strategy
    mine = [cell for cell in cells if cell.variant.strategy == strategy]
    for i, ranks in enumerate(sorted({c.world_size for c in mine})):
        of_size = sorted(
            (c for c in mine if c.world_size == ranks), key=lambda c: c.variant.fraction or 0
        )
        shares = [c.variant.fraction or 0 for c in of_size]
        more = [c.step_s - c.time.sgd_s for c in of_size]
        least = min(more)
        label = f"{ranks:,} ranks: {1e3 * least:.4g} ms"
        _line(axes, i, label, shares, [100 * (s / least - 1) for s in more])
    axes.set_title(f"what {strategy} adds to a step", loc="left")
    axes.set_ylabel("% above its best fraction")
    shares = sorted({c.variant.fraction or 0 for c in mine})
    use_powers_of_two(axes, "grad_worker_fraction", shares, lambda f: f"1/{1 / f:g}")
    axes.legend(frameon=False, handlelength=2.6)


def _line(axes: Axes, i: int, label: str, xs: Sequence[float], ys: Sequence[float]) -> None:
    (line,) = axes.plot(xs, ys, color=PALETTE[i % len(PALETTE)], label=label, linewidth=2.0)
    line.set_marker("o")
    line.set_markersize(4)
    dash_all_but_first(line, i)
