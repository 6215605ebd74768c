"""The figure of simulated steps, and the sentences above its panels, from the drawn numbers."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kfac_bench.report.figure_style import (
    PALETTE,
    REST,
    EndLabel,
    dash_all_but_first,
    label_ends,
    our_look,
    set_title,
    to_svg,
    use_log_heights,
    use_powers_of_two,
)
from kfac_bench.simulate.hardware import PredictionErrors
from kfac_bench.simulate.sweep import (
    SGD,
    SimulatedCell,
    Variant,
    efficiency,
    fastest,
    hidden_ranks,
)


def fractions(cells: Sequence[SimulatedCell]) -> list[SimulatedCell]:
    """Return the cells of strategies that were simulated with three fractions or more."""
    found = [cell for cell in cells if cell.variant.fraction is not None]
    shares = {strategy: set[Variant]() for strategy in {c.variant.strategy for c in found}}
    for cell in found:
        shares[cell.variant.strategy].add(cell.variant)
    return [cell for cell in found if len(shares[cell.variant.strategy]) >= 3]


def ranks_of(cells: Sequence[SimulatedCell]) -> list[int]:
    """Return the numbers of ranks, the smallest first."""
    return sorted({cell.world_size for cell in cells})


def step_finding(cells: Sequence[SimulatedCell], error: float) -> str:
    """Return a text: the fastest K-FAC step at the most ranks, beside SGD; "" without K-FAC.

    Args:
        cells: The cells.
        error: The relative error within which steps count as equal.
    """
    kfac, sgd = _on_most_ranks(cells)
    if not kfac:
        return ""
    best, *others = fastest(kfac, error)
    words = f"At {_ranks(best.world_size)} {best.variant.label} is the fastest K-FAC strategy"
    words += f" ({len(others)} more within the error)" if others else ""
    words += f": {1e3 * best.step_s:.3g} ms per step"
    bound = "at least " if sgd_is_bound(cells) else ""
    return words + "".join(f", SGD {bound}{1e3 * cell.step_s:.3g} ms" for cell in sgd)


def efficiency_finding(cells: Sequence[SimulatedCell], examples: int | None) -> str:
    """Return the efficiency at the most ranks; "" without K-FAC, or for one number of ranks."""
    kfac, sgd = _on_most_ranks(cells)
    if not kfac or len(ranks_of(cells)) < 2:
        return ""
    shares = sorted(100 * efficiency(cells, cell, examples) for cell in kfac)
    least, most = (f"{share:.0f}" for share in (shares[0], shares[-1]))
    extent = most if least == most else f"{least} to {most}"
    words = f"At {_ranks(kfac[0].world_size)} K-FAC keeps {extent} % of the speed per rank"
    bound = "at most " if sgd_is_bound(cells) else ""
    shares = [100 * efficiency(cells, cell, examples) for cell in sgd]
    return words + "".join(f", SGD {bound}{share:.0f} %" for share in shares)


def sgd_is_bound(cells: Sequence[SimulatedCell]) -> bool:
    """Return whether backward hides SGD's whole exchange on each number of ranks above 1."""
    several = {c.world_size for c in cells if c.variant.strategy == SGD and c.world_size > 1}
    return bool(several) and several == {*hidden_ranks(cells)}


def fraction_finding(cells: Sequence[SimulatedCell]) -> str:
    """Return the best share of gradient workers of one strategy, by the number of ranks."""
    best = {
        ranks: min((c for c in cells if c.world_size == ranks), key=lambda c: c.step_s)
        for ranks in ranks_of(cells)
    }
    shares = {ranks: _text(cell.variant.fraction) for ranks, cell in best.items()}
    if len(set(shares.values())) == 1:
        each = "every number of ranks" if len(shares) > 1 else _ranks(next(iter(shares)))
        return f"The fraction {next(iter(shares.values()))} is the fastest at {each}"
    parts = []
    for share, same in groupby(shares, key=lambda ranks: shares[ranks]):
        first, last = (group := [*same])[0], group[-1]
        parts.append(f"{share} at {f'{first:,} to ' if first != last else ''}{_ranks(last)}")
    return f"The fastest fraction is {', '.join(parts)}"


def _ranks(number: int) -> str:
    return f"{number:,} rank{'s' if number != 1 else ''}"


def _text(fraction: float | None) -> str:
    return str(Fraction(fraction or 0).limit_denominator(1 << 20))


def _on_most_ranks(
    cells: Sequence[SimulatedCell],
) -> tuple[list[SimulatedCell], list[SimulatedCell]]:
    """Return the cells at the most ranks: those with K-FAC, and those without."""
    most = max((cell.world_size for cell in cells), default=0)
    last = [cell for cell in cells if cell.world_size == most]
    kfac = [cell for cell in last if cell.variant.strategy != SGD]
    return kfac, [cell for cell in last if cell.variant.strategy == SGD]


_WIDTH_IN, _HEIGHT_IN, _AXES_PT = 6.4, 3.0, 140.0
"""Size of a panel, and the height of its axes. Panels are below each other: so they can be read on
a phone."""
_LETTERS = 58
"""Letters in a line of a title."""

_ALIKE = 0.05
"""Strategies share one line if their heights differ by at most this part everywhere. Lines that
lie on one another could not be told apart."""


def svg(
    cells: Sequence[SimulatedCell],
    title: str,
    errors: PredictionErrors,
    examples: int | None = None,
) -> str:
    """Draw the figure; equal cells give equal bytes. An epoch has ``examples``, if known.

    The first strategy with three fractions or more gets a third panel, which compares its
    fractions. It has no lines in the other panels, unless it is the only one.
    """
    swept = fractions(cells)
    swept = [cell for cell in swept if cell.variant.strategy == swept[0].variant.strategy]
    whole = [cell for cell in cells if cell not in swept] or [*cells]
    count = 3 if swept else 2
    with our_look():
        figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN * count), layout="constrained")
        steps, shares, *third = figure.subplots(count, 1)
        steps.set_ylabel("milliseconds per step")
        use_log_heights(steps)
        alike = _by_ranks(steps, whole, lambda cell: 1e3 * cell.step_s, "lower bound")
        subject = f"{title}, simulated, error {100 * errors.time:.1f} %{alike}"
        # The findings are about all cells, also about the fractions that the third panel compares.
        set_title(steps, step_finding(cells, errors.ratio), subject, _LETTERS)
        shares.set_ylabel("speed per rank (%)")
        shares.set_ylim(0, 105)
        alike = _by_ranks(
            shares, whole, lambda cell: 100 * efficiency(cells, cell, examples), "upper bound"
        )
        subject = f"{_baseline(whole)}{alike}"
        set_title(shares, efficiency_finding(cells, examples), subject, _LETTERS)
        for axes in third:
            _by_fraction(axes, swept)
        return to_svg(figure)


def _baseline(cells: Sequence[SimulatedCell]) -> str:
    """Return the sentence that says which speed is 100 %."""
    fewest = {
        min(c.world_size for c in cells if c.variant == variant)
        for variant in {cell.variant for cell in cells}
    }
    where = _ranks(fewest.pop()) if len(fewest) == 1 else "the fewest ranks of its line"
    return f"100 % is the speed per rank at {where}"


def _by_ranks(
    axes: Axes,
    cells: Sequence[SimulatedCell],
    height: Callable[[SimulatedCell], float],
    bound: str,
) -> str:
    """Draw a line per variant. SGD is grey, because K-FAC is compared with it.

    Args:
        axes: The panel.
        cells: The cells.
        height: The drawn number of a cell.
        bound: What this number of SGD is, if backward hides the whole exchange.

    Returns:
        What the title must say about shared lines.
    """
    use_powers_of_two(axes, "number of ranks", ranks_of(cells), "{:,}".format)
    ends: list[EndLabel] = []
    drawn: list[tuple[dict[int, float], str]] = []
    shared = ""
    variants = [*dict.fromkeys(cell.variant for cell in cells)]
    # A variant has its colour in all panels.
    numbers = {v: i for i, v in enumerate(v for v in variants if v.strategy != SGD)}
    for each in variants:
        ys = {
            cell.world_size: height(cell)
            for cell in sorted(cells, key=lambda c: c.world_size)
            if cell.variant == each
        }
        label = each.label
        if each.strategy == SGD:
            colour = _line(axes, None, ys)
            label += f", {bound}" if sgd_is_bound(cells) else ""
        elif (same := next((c for other, c in drawn if _are_alike(ys, other)), None)) is not None:
            colour, shared = same, f"; one line for strategies within {100 * _ALIKE:.0f} %"
        else:
            colour = _line(axes, numbers[each], ys)
            drawn.append((ys, colour))
        ends.append(EndLabel(list(ys.values())[-1], label, colour))
    label_ends(axes, ends, _AXES_PT)
    return shared


def _are_alike(ys: Mapping[int, float], others: Mapping[int, float]) -> bool:
    return ys.keys() == others.keys() and all(
        abs(ys[x] - others[x]) <= _ALIKE * max(ys[x], others[x]) for x in ys
    )


def _by_fraction(axes: Axes, cells: Sequence[SimulatedCell]) -> None:
    """Draw what one strategy adds to a step, relative to its best fraction, by number of ranks."""
    shares = sorted({c.variant.fraction or 0 for c in cells})
    label = "fraction of the ranks that precondition a layer (grad_worker_fraction)"
    use_powers_of_two(axes, label, shares, lambda f: f"1/{1 / f:g}")
    ends: list[EndLabel] = []
    for i, ranks in enumerate(ranks_of(cells)):
        of_size = sorted(
            (c for c in cells if c.world_size == ranks), key=lambda c: c.variant.fraction or 0
        )
        more = [c.step_s - c.time.sgd_s for c in of_size]
        least = min(more)
        ys = {
            c.variant.fraction or 0: 100 * (s / least - 1)
            for c, s in zip(of_size, more, strict=True)
        }
        colour = _line(axes, i, ys)
        label = f"{_ranks(ranks)}, {1e3 * least:.3g} ms"
        ends.append(EndLabel(list(ys.values())[-1], label, colour))
    subject = f"time that {cells[0].variant.strategy} adds to a step; labels: least time"
    set_title(axes, fraction_finding(cells), subject, _LETTERS)
    axes.set_ylabel("% above the least time")
    label_ends(axes, ends, _AXES_PT)


def _line(axes: Axes, number: int | None, points: Mapping[Any, float]) -> str:
    """Draw the line of the variant with this number, None for SGD's; return its colour."""
    colour = REST if number is None else PALETTE[number % len(PALETTE)]
    (line,) = axes.plot(
        list(points), list(points.values()), color=colour, linewidth=2.0, marker="o", markersize=4
    )
    dash_all_but_first(line, number or 0)
    return colour
