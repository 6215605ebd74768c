"""The results of a benchmark: lines with measured, computed and published numbers.

All functions are pure functions of event files and of the benchmark's file.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kfac_bench.benchmark.measures import (
    COMPUTED,
    PhaseRuns,
    measure,
    percent_less,
    seconds_at_least,
)
from kfac_bench.benchmark.schema import Benchmark, Quantity
from kfac_bench.errors import UsageError
from kfac_bench.record.runs import Run
from kfac_bench.record.score import mean_with_interval, median_with_interval

GridPoint = Mapping[str, str]
"""Axis to value."""
PointKey = frozenset[tuple[str, str]]
"""A point that can be the key of a mapping. It does not keep the order of the axes."""


def key_of(point: GridPoint) -> PointKey:
    """Return the point as a key of a mapping."""
    return frozenset(point.items())


def point_of(key: PointKey, axes: Sequence[str]) -> GridPoint:
    """Return the point of a key with its axes in the given order."""
    values = dict(key)
    return {axis: values[axis] for axis in (*axes, *sorted(values)) if axis in values}


PublishedValue = float | tuple[float, float]
"""A published number, or the ends of a published range."""
PublishedByPoint = dict[PointKey, tuple[PublishedValue, str]]
"""Published numbers of a quantity with their sources. A key has the axes that the paper names."""
LEAST = "least"
HOW = ("less", "percent", "ratio", "difference")
"""Ways to compare two points; see :attr:`.schema.Quantity.how`."""


@dataclass(frozen=True)
class Measured:
    """A number over seeds with its 95 % interval. A miss is infinite and is not left out.

    The number is the mean with its t interval for a difference of two points, if no seed missed.
    Otherwise it is the median, with its interval.
    """

    value: float
    low: float
    high: float
    seeds: int
    missed: int
    bounds: int = 0
    """Number of seeds that have an upper bound in place of a number: a ratio to seconds that the
    other run had trained when it missed, so that the true ratio is smaller."""
    mean: float = math.nan
    """The mean over seeds; infinite if a seed missed. A table shows the means of two points beside
    their mean difference."""


@dataclass(frozen=True)
class Line:
    """One quantity at one point: our number and the paper's number."""

    point: GridPoint
    quantity: str
    unit: str
    measured: Measured | None = None
    computed: float | None = None
    published: PublishedValue | None = None
    source: str = ""
    is_difference: bool = False
    """True if the number is a difference of two numbers: a ratio of differences has no meaning."""
    is_projected: bool = False
    """True if measured seconds were multiplied by an assumed number of epochs or steps."""
    known: str = ""
    """``fitted``, ``given`` or ``chosen afterwards`` if the computed number is no prediction; see
    :class:`Known`."""

    @property
    def ours(self) -> float | None:
        """The measured number, or else the computed number."""
        return self.computed if self.measured is None else self.measured.value


@dataclass
class CellRuns:
    """The runs of a benchmark's cells, by point."""

    trained: dict[PointKey, dict[int, Run | None]] = field(default_factory=dict)
    """Runs that trained, by seed; None: the cell failed."""
    computed: dict[PointKey, list[Run]] = field(default_factory=dict)
    """Cells that trained nothing. Two computed parts may have the same point."""
    phases: PhaseRuns = field(default_factory=dict)
    """Earlier runs that quantities name."""


def lines(benchmark: Benchmark, found: CellRuns, level: float | None) -> list[Line]:
    """Return a line for every quantity and point with a number, in the order of the file."""
    printed = published_values(benchmark)
    result: list[Line] = []
    used: set[tuple[str, PointKey]] = set()
    values = _Values(benchmark, found, level)
    axes = [*axes_of(benchmark)]
    for name, quantity in benchmark.quantities.items():
        for key in _keys(found, printed.get(name, {})):
            point = point_of(key, axes)
            line = values.line(name, quantity, point, printed)
            if line is not None:
                result.append(line)
                used |= {(name, known) for known in printed.get(name, {}) if known <= key}
    # Published numbers without a number of ours.
    for name, of in printed.items():
        for key, (value, source) in of.items():
            if (name, key) not in used:
                point = point_of(key, axes)
                result.append(Line(point, name, "", published=value, source=source))
    return sorted(result, key=_order(benchmark))


def _keys(found: CellRuns, printed: PublishedByPoint) -> list[PointKey]:
    """Return the points of our cells, then the points that only the paper has."""
    ours = list(dict.fromkeys([*found.trained, *found.computed]))
    # A paper may name fewer axes than our points have: then its key is a subset of ours.
    theirs = [key for key in printed if not any(key <= own for own in ours)]
    return [*ours, *theirs]


def _order(benchmark: Benchmark) -> Callable[[Line], tuple[int, list[int]]]:
    """Return the sort key of lines: by quantity, then by the values of the axes."""
    names = [*benchmark.quantities]
    axes = axes_of(benchmark)

    def place(line: Line) -> tuple[int, list[int]]:
        at = [v.index(line.point[a]) if line.point.get(a) in v else -1 for a, v in axes.items()]
        return names.index(line.quantity) if line.quantity in names else len(names), at

    return place


def axes_of(benchmark: Benchmark) -> dict[str, list[str]]:
    """Return each axis with all values that the row, a profile or a computed part has."""
    axes: dict[str, dict[str, None]] = {}
    grids = [p.axes for p in benchmark.profiles.values()]
    for grid in [benchmark.axes, *grids, *(p.axes for p in benchmark.computed)]:
        for axis, values in grid.items():
            axes.setdefault(axis, {}).update(dict.fromkeys(values))
    numeric = {a: all(_is_whole(v) for v in values) for a, values in axes.items()}
    return {a: sorted(v, key=int) if numeric[a] else list(v) for a, v in axes.items()}


def how_computed(benchmark: Benchmark) -> str:
    """Return the word for numbers of computed cells in tables and figures."""
    kinds = {part.kind for part in benchmark.computed}
    return "simulated" if kinds and kinds <= {"simulate", "phases"} else "computed"


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal()


class _Values:
    """The numbers of quantities at points, calculated from runs."""

    def __init__(self, benchmark: Benchmark, found: CellRuns, level: float | None) -> None:
        self._quantities = benchmark.quantities
        self._known = [known for part in benchmark.computed for known in part.known]
        self._found, self._level = found, level

    def line(
        self,
        name: str,
        quantity: Quantity,
        point: GridPoint,
        printed: Mapping[str, PublishedByPoint],
    ) -> Line | None:
        """Return the line of a quantity at a point; None if there is no number at all."""
        if any(point.get(axis) not in of for axis, of in quantity.only.items()):
            return None
        trained = self._trained(name, point)
        computed = self._computed(name, point)
        value, source = _at(printed.get(name, {}), point)
        if value is None and quantity.of:
            value, source = self._derived(quantity, point, printed)
        if trained is None and computed is None and value is None:
            return None
        return Line(
            point,
            name,
            quantity.unit,
            trained,
            computed,
            value,
            source,
            is_difference=quantity.how == "difference",
            is_projected=self._is_projected(quantity),
            known="" if computed is None else self._how_known(name, point),
        )

    def _is_projected(self, quantity: Quantity) -> bool:
        of = self._quantities.get(quantity.of)
        return bool(quantity.times) or (of is not None and self._is_projected(of))

    def _how_known(self, name: str, point: GridPoint) -> str:
        for known in self._known:
            if known.quantity == name and all(point.get(a) in v for a, v in known.only.items()):
                return known.how
        return ""

    def _trained(self, name: str, point: GridPoint) -> Measured | None:
        runs = self._found.trained.get(key_of(point), {})
        each = {seed: self._value(name, point, seed) for seed in runs}
        numbers = [value for value in each.values() if value is not None]
        if not numbers:
            return None
        missed = sum(math.isinf(value) for value in numbers)
        bounds = sum(self._is_bound(name, point, seed) for seed in each if each[seed] is not None)
        is_mean = self._quantities[name].how == "difference" and not missed
        interval = mean_with_interval(numbers) if is_mean else median_with_interval(numbers)
        mean = sum(numbers) / len(numbers)
        # Rounded, because equal numbers have a mean difference such as 1e-15.
        middle, low, high, mean = (round(number, 9) for number in (*interval, mean))
        return Measured(middle, low, high, len(numbers), missed, bounds, mean)

    def _is_bound(self, name: str, point: GridPoint, seed: int) -> bool:
        """Return whether the number of this seed is a ratio to seconds of a run that missed."""
        quantity = self._quantities[name]
        base = self._base(quantity, point, list(self._found.trained)) if quantity.of else None
        if base is None or quantity.how != "ratio":
            return False
        own, other = (self._value(quantity.of, p, seed) for p in (point, base))
        return own != math.inf and other == math.inf

    def _value(self, name: str, point: GridPoint, seed: int) -> float | None:
        """Return the number of one seed: the worst value for a miss, None without a number."""
        quantity = self._quantities[name]
        worst = -math.inf if quantity.higher else math.inf
        if quantity.of:
            base = self._base(quantity, point, list(self._found.trained))
            if base is None:
                return None
            own, other = (self._value(quantity.of, p, seed) for p in (point, base))
            if quantity.how == "ratio" and other == math.inf:
                other = self._at_least(quantity.of, base, seed)
            return _beside(own, other, quantity.how, worst)
        runs = self._found.trained.get(key_of(point), {})
        if seed not in runs:
            return None
        run = runs[seed]
        if run is None:  # The cell failed, which counts as a miss.
            return None if quantity.measure in COMPUTED else worst
        if quantity.phases:
            less = percent_less(quantity, run, seed, self._found.phases)
            return None if math.isnan(less) else less
        level = self._level
        if quantity.level_of:
            level = self._final_of(point, quantity.level_of, seed)
            if level is None:
                return None
        value = measure(run, quantity.measure, level)
        if math.isinf(value):
            return worst
        return None if math.isnan(value) else value * quantity.scale * _times(quantity, point)

    def _at_least(self, name: str, point: GridPoint, seed: int) -> float:
        """Return the seconds that a run had trained when it missed; inf if they are not known."""
        quantity = self._quantities[name]
        run = self._found.trained.get(key_of(point), {}).get(seed)
        seconds = math.inf if run is None else seconds_at_least(run, quantity.measure)
        return seconds * quantity.scale * _times(quantity, point)

    def _final_of(self, point: GridPoint, level_of: GridPoint, seed: int) -> float | None:
        """Return the final metric of the point that sets the level; None if it has none."""
        runs = self._found.trained.get(key_of({**point, **level_of}), {})
        run = runs.get(seed)
        level = math.nan if run is None else measure(run, "final", None)
        return level if math.isfinite(level) else None

    def _computed(self, name: str, point: GridPoint) -> float | None:
        quantity = self._quantities[name]
        if quantity.of:
            base = self._base(quantity, point, list(self._found.computed))
            if base is None:
                return None
            own, other = (self._computed(quantity.of, p) for p in (point, base))
            return _beside(own, other, quantity.how, None)
        for run in self._found.computed.get(key_of(point), []):
            value = measure(run, quantity.measure, None)
            if math.isfinite(value):
                return value * quantity.scale * _times(quantity, point)
        return None

    def _base(
        self, quantity: Quantity, point: GridPoint, keys: Sequence[PointKey]
    ) -> GridPoint | None:
        """Return the point to compare with; None if `point` is that point itself."""
        if any(axis not in point for axis in quantity.against):
            return None
        base = dict(point)
        for axis, value in quantity.against.items():
            if value == LEAST:
                # The smallest value on this axis that our cells have, with all other axes equal.
                rest = {k: v for k, v in point.items() if k != axis}
                alike = [dict(key) for key in keys if key_of(rest) <= key]
                there = [p[axis] for p in alike if axis in p and _is_whole(p[axis])]
                value = min(there, key=int, default=point[axis])
            base[axis] = value
        return None if base == dict(point) else base

    def _derived(
        self,
        quantity: Quantity,
        point: GridPoint,
        printed: Mapping[str, PublishedByPoint],
    ) -> tuple[PublishedValue | None, str]:
        """Return the number from two published ones, for a paper that does not print it."""
        base = self._base(quantity, point, [])
        if base is None:
            return None, ""
        of = printed.get(quantity.of, {})
        (own, source), (other, _) = _at(of, point), _at(of, base)
        if not isinstance(own, float) or not isinstance(other, float):
            return None, ""
        return _beside(own, other, quantity.how, None), f"from {source}"


def _times(quantity: Quantity, point: GridPoint) -> float:
    factor = 1.0
    for axis, of in quantity.times.items():
        factor *= float(of.get(point.get(axis), 1.0))
    return factor


def _beside(own: float | None, other: float | None, how: str, worst: float | None) -> float | None:
    """Compare two numbers; None if the other number is missing or is a missed target."""
    if own is None or other is None or math.isinf(other):
        return None
    if math.isinf(own):
        return worst
    if how == "difference":
        return own - other
    if other == 0:
        return None
    return {"less": 100 * (1 - own / other), "percent": 100 * own / other}.get(how, own / other)


def published_values(benchmark: Benchmark) -> dict[str, PublishedByPoint]:
    """Return the published numbers by quantity.

    Raises:
        UsageError: A value is no number and no range.
    """
    result: dict[str, PublishedByPoint] = {}
    for entry in benchmark.published:
        for values, leaf in _leaves(entry.values, len(entry.by)):
            key = frozenset(zip(entry.by, values, strict=True))
            result.setdefault(entry.quantity, {})[key] = (leaf, entry.source)
    return result


def _leaves(tree: object, depth: int) -> Iterator[tuple[tuple[str, ...], PublishedValue]]:
    """Yield each value of nested mappings, with the keys that lead to the value."""
    if depth:
        if not isinstance(tree, Mapping):
            raise UsageError(f"published: values: {tree!r}: expected a mapping for each axis of by")
        for key, below in tree.items():
            for rest, leaf in _leaves(below, depth - 1):
                yield (str(key), *rest), leaf
    elif isinstance(tree, int | float):
        yield (), float(tree)
    elif isinstance(tree, list) and [isinstance(end, int | float) for end in tree] == [True, True]:
        yield (), (float(tree[0]), float(tree[1]))
    else:
        raise UsageError(f"published: values: {tree!r}: expected a number, or [low, high]")


def _at(of: PublishedByPoint, point: GridPoint) -> tuple[PublishedValue | None, str]:
    return next((found for key, found in of.items() if key <= key_of(point)), (None, ""))
