"""The tables of a benchmark: our numbers beside the published ones, and its cells."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from kfac_bench.benchmark.grid import joined_axes, options_of_value
from kfac_bench.benchmark.result import Line, Measured, PublishedValue, axes_of, how_computed
from kfac_bench.benchmark.schema import Benchmark, BenchmarkProfile
from kfac_bench.benchmark.suite import Attempt
from kfac_bench.benchmark.verdicts import MISSED
from kfac_bench.record.runs import plain, was_computed
from kfac_bench.record.score import status
from kfac_bench.report.page_parts import link_from
from kfac_bench.report.tables import DASH, Link, Table, Value, text


def compared(
    benchmark: Benchmark, lines: Sequence[Line], notes: Sequence[str], ran: str = ""
) -> Table:
    """Return our numbers beside those of the paper. Columns that no line needs are left out.

    Args:
        benchmark: The table or figure.
        lines: The lines to show.
        notes: The texts below the table.
        ran: What ran in place of the paper's model and data; empty: what the paper ran.
    """
    axes = [a for a in axes_of(benchmark) if any(a in line.point for line in lines)]
    has_runs = any(line.measured for line in lines)
    # Measured seconds times an assumed number of epochs are not measured.
    kinds = [
        name
        for name, is_projected in (("measured", False), ("projected", True))
        if any(line.measured and line.is_projected is is_projected for line in lines)
    ]
    has_computed = any(line.computed is not None for line in lines)
    columns = [*axes, "quantity"]
    columns += [f"{kind}: {ran}" if ran else kind for kind in kinds]
    columns += ["95 %", "seeds"] if has_runs else []
    columns += [how_computed(benchmark)] if has_computed else []
    has_published = any(line.published is not None for line in lines)
    columns += ["published", "ratio", "source"] if has_published else []
    rows: list[Sequence[Value]] = []
    for line in lines:
        row: list[Value] = [line.point.get(axis, "") for axis in axes]
        row.append(f"{line.quantity} ({line.unit})" if line.unit else line.quantity)
        if has_runs:
            value, interval, seeds = _measured(line.measured)
            kind = "projected" if line.is_projected else "measured"
            row += [value if each == kind else None for each in kinds]
            row += [interval, seeds]
        if has_computed:
            row.append(_computed(line))
        if has_published:
            row += [published(line.published), ratio(line, stands_in=bool(ran)), line.source]
        rows.append(row)
    return Table(benchmark.title, columns, rows, notes)


def _measured(measured: Measured | None) -> list[Value]:
    """Return the cells of median, interval and seeds."""
    if measured is None:
        return [None, None, None]
    seeds: Value = measured.seeds
    if measured.missed:
        seeds = f"{measured.seeds - measured.missed} of {measured.seeds}"
    value: Value = MISSED if math.isinf(measured.value) else measured.value
    if measured.bounds and math.isfinite(measured.value):
        value = f"at most {text(measured.value)}"
    low, high = (MISSED if math.isinf(x) else text(x) for x in (measured.low, measured.high))
    interval = None if measured.low == measured.high else f"{low} {DASH} {high}"
    return [value, interval, seeds]


def _computed(line: Line) -> Value:
    """Return the computed number; a number that is no prediction has a word beside it."""
    if line.computed is None or not line.known:
        return line.computed
    return f"{text(line.computed)} ({line.known})"


def published(value: PublishedValue | None) -> Value:
    """Return a published number or range as a table shows it."""
    if isinstance(value, tuple):
        return f"{text(value[0])} {DASH} {text(value[1])}"
    return value


def ratio(line: Line, *, stands_in: bool = False) -> Value:
    """Return our number over the paper's; for a range, whether our number is within it.

    With ``stands_in`` another model or other data ran than the paper's: only a computed number is
    compared. A number that the table itself gave is never compared.
    """
    is_measured = line.measured is not None and not stands_in
    ours, theirs = line.ours if is_measured else line.computed, line.published
    if line.known and not is_measured:
        return None
    if ours is None or theirs is None or math.isinf(ours):
        return None
    if isinstance(theirs, tuple):
        return "within" if theirs[0] <= ours <= theirs[1] else "outside"
    # A ratio of differences, or of numbers with different signs, has no meaning.
    if line.is_difference or theirs == 0 or ours * theirs < 0:
        return None
    return ours / theirs


def matrix(benchmark: Benchmark, lines: Sequence[Line]) -> Table | None:
    """Return the numbers in the shape of the paper's table, the published ones in parentheses."""
    spec = benchmark.matrix
    if spec is None:
        return None
    axes = axes_of(benchmark)
    columns = [(quantity, value) for quantity in spec.quantities for value in axes[spec.columns]]
    at = {
        (line.point.get(spec.rows), line.quantity, line.point.get(spec.columns)): line
        for line in lines
    }
    rows: list[Sequence[Value]] = []
    for value in axes[spec.rows]:
        found = [at.get((value, *column)) for column in columns]
        if any(found):
            rows.append([value, *(_pair(line) for line in found)])
    quantities = benchmark.quantities
    units = {name: f" ({each.unit})" if each.unit else "" for name, each in quantities.items()}
    names = [spec.rows, *(f"{name}{units[name]}, {value}" for name, value in columns)]
    notes = [
        "our number (measured, projected or computed), then the published number in parentheses"
    ]
    return Table(f"{benchmark.title}: as a matrix", names, rows, notes)


def _pair(line: Line | None) -> Value:
    """Return our number and the published one as one text."""
    if line is None:
        return None
    ours = text(_measured(line.measured)[0] if line.measured else line.computed)
    if line.known and not line.measured:
        ours += f", {line.known}"
    theirs = published(line.published)
    return ours if theirs is None else f"{ours} ({text(theirs)})"


def attempts_table(found: Sequence[Attempt], folder: Path) -> Table:
    """Return the table of cells, each with a link to its events from a table in ``folder``."""
    rows: list[Sequence[Value]] = []
    for each in found:
        if each.run is None:
            why = plain(each.reason) if each.reason else None
            rows.append([each.label, each.state.value, None, None, why])
            continue
        link = Link(each.path.name, link_from(folder.resolve(), each.run.path))
        if was_computed(each.run):
            rows.append([each.label, "computed", None, None, link])
        else:
            last = each.run.events[-1]
            rows.append([each.label, status(each.run), last.step, last.train_s, link])
    return Table("Cells", ["cell", "state", "steps", "training seconds", "events"], rows)


def stands_for(
    benchmark: Benchmark, profile: BenchmarkProfile, overrides: Sequence[str]
) -> Table | None:
    """Return the table of overrides: of each axis value in this profile, and of all cells."""
    rows: list[Sequence[Value]] = []
    axes: Mapping[str, list[str]] = benchmark.axes | profile.axes
    for axis, values in axes.items():
        for value in values:
            if options := options_of_value(benchmark, profile, axis, value):
                rows.append([axis, value, " ".join(options)])
    for joined in joined_axes(benchmark, profile):
        for point in itertools.product(*(axes[axis] for axis in joined.split(" "))):
            if options := options_of_value(benchmark, profile, joined, " ".join(point)):
                rows.append([joined, " ".join(point), " ".join(options)])
    common = [*benchmark.overrides, *profile.overrides, *overrides]
    if common:
        rows.append(["all", "", " ".join(common)])
    return Table("What the cells run", ["axis", "value", "overrides"], rows) if rows else None
