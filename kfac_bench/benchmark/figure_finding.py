"""The finding of a benchmark's figure, in one sentence that is computed from the drawn numbers.

The sentence compares the values of one axis, such as the optimizers. Lines that differ on this axis
only are one comparison. Measured numbers are used if there are any, or else computed and published
numbers. The sentence begins with the kind of the numbers.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kfac_bench.benchmark.result import Line, Measured, how_computed
from kfac_bench.benchmark.schema import Benchmark, FigureSpec
from kfac_bench.output import listed
from kfac_bench.record.runs import plain
from kfac_bench.report.tables import text

QUANTITY = "quantity"
"""Name of the x axis in a figure of several quantities."""
KINDS = ("measured", "computed", "published")


def heights(line: Line) -> Iterator[tuple[str, float]]:
    """Yield the kind and the height of each bar of the line."""
    if line.measured is not None:
        yield "measured", line.measured.value
    if line.computed is not None:
        yield "computed", line.computed
    if isinstance(line.published, float):
        yield "published", line.published


def word_of_measured(lines: Sequence[Line]) -> str:
    """Return ``measured``, or ``projected`` if all measured numbers are multiples of measured ones.

    For example, the seconds of an epoch times an assumed number of epochs are projected.
    """
    measured = [line for line in lines if line.measured is not None]
    return "projected" if measured and all(x.is_projected for x in measured) else "measured"


def value_on(axis: str, line: Line) -> str:
    """Return the line's value on an axis of the figure; "" if it has none."""
    return line.quantity if axis == QUANTITY else line.point.get(axis, "")


@dataclass(frozen=True)
class _Bar:
    """One drawn number and its line."""

    name: str
    """The value of the axis that the sentence compares, in words."""
    height: float
    unit: str
    line: Line
    interval: Measured | None
    """The interval of a measured number."""


def figure_finding(benchmark: Benchmark, lines: Sequence[Line], ran: str = "") -> str:
    """Return the finding; "" if the figure has nothing to compare.

    Args:
        benchmark: The table or figure.
        lines: The drawn lines.
        ran: What ran in place of the paper's model and data; empty: what the paper ran.
    """
    spec = benchmark.figure
    if spec is None:
        return ""
    found: list[str] = []
    for kind in KINDS:
        comparisons = _comparisons(benchmark, spec, lines, kind)
        if not comparisons:
            continue
        if found:  # One example is enough: that of the published numbers.
            found = [found[0].partition(" (")[0]]
        with_what = f" with {plain(ran)}" if ran and kind == "measured" else ""
        said = _largest_quantity if len(spec.quantities) > 1 else _best
        head = _kind(benchmark, comparisons, kind)
        head = head.lower() if found else head
        found.append(f"{head}{with_what}: {said(benchmark, comparisons)}")
        if kind == "measured":
            break
    # A prediction must not hide that the published numbers say something else.
    return "; ".join(found)


def _comparisons(
    benchmark: Benchmark, spec: FigureSpec, lines: Sequence[Line], kind: str
) -> dict[str, list[_Bar]]:
    """Return the bars of each comparison, by the rest of their point in words."""
    axis = spec.compared or spec.colour
    # A line with a published number alone names no unit.
    units = {name: quantity.unit for name, quantity in benchmark.quantities.items()}
    found: dict[str, list[_Bar]] = {}
    for line in lines:
        rest = [_words(a, value) for a, value in line.point.items() if a != axis]
        if spec.x == QUANTITY:
            rest.insert(0, line.quantity)
        for what, height in heights(line):
            if what == kind and axis in line.point:
                interval = line.measured if kind == "measured" else None
                unit = line.unit or units.get(line.quantity, "")
                bar = _Bar(_words(axis, line.point[axis]), height, unit, line, interval)
                found.setdefault(", ".join(rest), []).append(bar)
    return {
        where: bars
        for where, bars in found.items()
        if len(bars) > 1 and any(math.isfinite(bar.height) for bar in bars)
    }


def _kind(benchmark: Benchmark, comparisons: dict[str, list[_Bar]], kind: str) -> str:
    """Return the kind of the numbers in words. A fit or a given number is no prediction."""
    lines = [bar.line for bars in comparisons.values() for bar in bars]
    if kind == "measured":
        return word_of_measured(lines).capitalize()
    if kind == "published":
        return "Published"
    known = {line.known for line in lines}
    words = [how_computed(benchmark).capitalize(), *sorted(known)]
    return words[0] if "" in known else ", ".join(words)


def _words(axis: str, value: str) -> str:
    """Return the value of an axis in words: ``8 gpus``, ``batch 256``, ``K-FAC``."""
    if not value[:1].isdigit():
        return plain(value)
    if axis.endswith("s"):
        return plain(f"{value} {axis.removesuffix('s') if value == '1' else axis}")
    return plain(f"{axis} {value}")


def _best(benchmark: Benchmark, comparisons: dict[str, list[_Bar]]) -> str:
    """Return a text: the value that wins the most comparisons, and the numbers of one of them."""
    name = next(iter(comparisons.values()))[0].line.quantity
    quantity = benchmark.quantities.get(name)
    is_higher_better = quantity is not None and quantity.higher
    first = {
        where: _first(bars, is_higher_better=is_higher_better)
        for where, bars in comparisons.items()
    }
    wins = Counter(bar.name for bars in first.values() for bar in bars)
    if not wins:
        return f"no difference in {name} in {_count(len(comparisons), len(comparisons))}"
    best = [name for name, count in wins.items() if count == max(wins.values())]
    # A comparison that one value has won alone shows more than a tie.
    won = [where for where, bars in first.items() if best[0] in {bar.name for bar in bars}]
    where = ([where for where in won if len(first[where]) == 1] or won)[-1]
    compared = comparisons[where]
    winner = next(bar for bar in compared if bar.name == best[0])
    others = [bar for bar in compared if bar not in first[where]]
    second = _sorted(others, is_higher_better=is_higher_better)[0]
    numbers = f"{_number(winner)}, {second.name} {_number(second)}{_overlap(winner, second)}"
    claim = f"{_have(best)} the {_most(winner, is_higher_better)}"
    if len(comparisons) == 1:
        return f"{claim}: {numbers}"
    claim += f" in {_count(wins[best[0]], len(comparisons))}"
    return claim if len(best) > 1 else f"{claim} ({where}: {numbers})"


def _have(names: Sequence[str]) -> str:
    """Return the names with their verb: ``K-FAC has``, ``1 gpu and 8 gpus each have``."""
    if len(names) > 1:
        return f"{listed(names)} each have"
    is_plural = names[0][:1].isdigit() and names[0].endswith("s")
    return f"{names[0]} {'have' if is_plural else 'has'}"


def _sorted(bars: Sequence[_Bar], *, is_higher_better: bool) -> list[_Bar]:
    # A missed target is infinite, with the sign of the worst value.
    return sorted(bars, key=lambda bar: bar.height, reverse=is_higher_better)


def _first(bars: Sequence[_Bar], *, is_higher_better: bool) -> list[_Bar]:
    """Return the best bars: several if tables print the same number; [] if all bars are equal."""
    best = _sorted(bars, is_higher_better=is_higher_better)[0]
    equal = [bar for bar in bars if text(bar.height) == text(best.height)]
    return equal if len(equal) < len(bars) else []


def _most(bar: _Bar, is_higher_better: bool) -> str:
    """Return the superlative with the quantity: ``highest accuracy``, ``fewest steps``."""
    if is_higher_better:
        return f"{'highest' if bar.unit == '%' else 'largest'} {bar.line.quantity}"
    is_counted = bar.line.quantity.split(" ")[0].endswith("s")
    return f"{'fewest' if is_counted else 'smallest'} {bar.line.quantity}"


def _largest_quantity(_: Benchmark, comparisons: dict[str, list[_Bar]]) -> str:
    """Return the quantity with the highest bar, and its bars."""
    largest = max(
        comparisons, key=lambda where: max(_finite(bar.height) for bar in comparisons[where])
    )
    numbers = ", ".join(f"{bar.name} {_number(bar)}" for bar in comparisons[largest])
    return f"the largest of {len(comparisons)} quantities is {largest} ({numbers})"


def _finite(height: float) -> float:
    return height if math.isfinite(height) else -math.inf


def _number(bar: _Bar) -> str:
    if math.isinf(bar.height):
        return "misses the target"
    # Four digits, as in tables, but never a power of ten.
    number = text(bar.height) if abs(bar.height) < 1e4 else f"{bar.height:,.0f}"
    return f"{number} {bar.unit}".strip()


def _overlap(one: _Bar, other: _Bar) -> str:
    """Return a warning if the 95 % intervals of two measured numbers overlap."""
    ours, theirs = one.interval, other.interval
    if ours is None or theirs is None:
        return ""
    if min(ours.seeds, theirs.seeds) < 2 or max(ours.low, theirs.low) > min(ours.high, theirs.high):
        return ""
    return "; their 95 % intervals overlap"


def _count(part: int, whole: int) -> str:
    if part < whole:
        return f"{part} of {whole} comparisons"
    return {1: "this comparison", 2: "both comparisons"}.get(whole, f"all {whole} comparisons")
