"""A benchmark's tables: measured beside published, its cells, what a profile runs for them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kfac_bench.benchmark.result import Line, Measured, PublishedValue, axes_of, how_computed
from kfac_bench.benchmark.schema import Benchmark, BenchmarkProfile
from kfac_bench.record.runs import Run, plain
from kfac_bench.record.score import status
from kfac_bench.report.tables import Link, Table, Value, text

DASH = "\u2013"
MISSED = "missed"
PENDING = ("not run yet", "has not ended")
"""Of a cell that is neither done nor failed."""


@dataclass(frozen=True)
class Attempt:
    """A cell and what it came to: a run, or why there is none."""

    label: str
    path: Path
    run: Run | None
    reason: str = ""


def compared(benchmark: Benchmark, lines: Sequence[Line], notes: Sequence[str]) -> Table:
    """Ours beside the paper's; columns that no line needs are left out."""
    axes = [a for a in axes_of(benchmark) if any(a in line.point for line in lines)]
    has_runs = any(line.measured for line in lines)
    has_computed = any(line.computed is not None for line in lines)
    columns = [*axes, "quantity"]
    columns += ["measured", "95 %", "seeds"] if has_runs else []
    columns += [how_computed(benchmark)] if has_computed else []
    columns += ["published", "ratio", "source"]
    rows: list[Sequence[Value]] = []
    for line in lines:
        row: list[Value] = [line.point.get(axis, "") for axis in axes]
        row.append(f"{line.quantity} ({line.unit})" if line.unit else line.quantity)
        if has_runs:
            row += _measured(line.measured)
        if has_computed:
            row.append(line.computed)
        row += [printed(line.published), ratio(line), line.source]
        rows.append(row)
    return Table(benchmark.title, columns, rows, notes)


def _measured(found: Measured | None) -> list[Value]:
    if found is None:
        return [None, None, None]
    seeds: Value = found.seeds
    if found.missed:
        seeds = f"{found.seeds - found.missed} of {found.seeds}"
    value: Value = MISSED if math.isinf(found.median) else found.median
    interval = None if found.low == found.high else f"{_end(found.low)} {DASH} {_end(found.high)}"
    return [value, interval, seeds]


def _end(value: float) -> str:
    return MISSED if math.isinf(value) else text(value)


def printed(value: PublishedValue | None) -> Value:
    """A published number or range as a table shows it."""
    if isinstance(value, tuple):
        return f"{text(value[0])} {DASH} {text(value[1])}"
    return value


def ratio(line: Line) -> Value:
    """Ours over the paper's; of a range, whether ours is in it."""
    ours, theirs = line.ours, line.published
    if ours is None or theirs is None or math.isinf(ours):
        return None
    if isinstance(theirs, tuple):
        return "within" if theirs[0] <= ours <= theirs[1] else "outside"
    if line.difference or theirs == 0 or ours * theirs < 0:
        return None
    return ours / theirs


def attempts(found: Sequence[Attempt], folder: Path) -> Table:
    """Each cell with its events; ``folder`` is where the table is written."""
    rows: list[Sequence[Value]] = []
    for each in found:
        if each.run is None:
            pending = each.reason in PENDING
            state, why = (each.reason, None) if pending else ("failed", plain(each.reason))
            rows.append([each.label, state, None, None, why])
            continue
        steps, seconds = each.run.events[-1].step, each.run.events[-1].train_s
        href = os.path.relpath(each.run.path, folder.resolve())
        link = Link(each.path.name, href)
        trained = "computed" not in each.run.started.config
        state = status(each.run) if trained else "computed"
        rows.append(
            [each.label, state, steps if trained else None, seconds if trained else None, link]
        )
    return Table("Cells", ["cell", "state", "steps", "training seconds", "events"], rows)


def stands_for(
    benchmark: Benchmark, profile: BenchmarkProfile, overrides: Sequence[str]
) -> Table | None:
    """What the axes' names mean in this profile, and what the user has added."""
    rows: list[Sequence[Value]] = []
    axes: Mapping[str, list[str]] = benchmark.axes | profile.axes
    for axis, values in axes.items():
        each = benchmark.each.get(axis, {}) | profile.each.get(axis, {})
        rows += [[axis, value, " ".join(each[value])] for value in values if each.get(value)]
    common = [*benchmark.overrides, *profile.overrides, *overrides]
    if common:
        rows.append(["all", "", " ".join(common)])
    return Table("What the cells run", ["axis", "value", "overrides"], rows) if rows else None
