"""One row of the suite: it runs its cells and reads their results from their files."""

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kfac_bench.benchmark import computed, grid, run_end, schema
from kfac_bench.benchmark.catalog import CLAIMS, ORDER
from kfac_bench.benchmark.computed import ComputedCell
from kfac_bench.benchmark.grid import Cell, TimeIsUp, WorkSession
from kfac_bench.benchmark.measures import MEASURES, exists, load_phases
from kfac_bench.benchmark.result import (
    HOW,
    LEAST,
    CellRuns,
    Line,
    axes_of,
    key_of,
    lines,
    published_values,
)
from kfac_bench.benchmark.schema import Benchmark, BenchmarkProfile, Check
from kfac_bench.config.option_table import did_you_mean
from kfac_bench.errors import UsageError
from kfac_bench.record.events import EVENTS_FILE
from kfac_bench.record.runs import Run, load, was_computed

GridAxes = Mapping[str, Sequence[str]]
"""Axis to its values."""


class AttemptState(Enum):
    """The progress of a cell; the value is the text in the table."""

    NEW = "not run yet"
    BLOCKED = "not run"
    """The run that the cell starts from failed."""
    STARTED = "has not ended"
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True)
class Attempt:
    """A cell with its run, or with the reason why it has no run."""

    label: str
    path: Path
    state: AttemptState
    run: Run | None = None
    reason: str = ""


@dataclass(frozen=True)
class BenchmarkRow:
    """A table or figure at one size (profile), with the user's overrides."""

    name: str
    benchmark: Benchmark
    profile: str
    sized: BenchmarkProfile
    cells: Sequence[Cell]
    computed: Sequence[ComputedCell]
    folder: Path
    overrides: Sequence[str] = field(default_factory=list)
    left_out: Sequence[str] = field(default_factory=list)
    """Labels of the cells that may not run yet; see :func:`schema.may_run`."""
    is_part: bool = False
    """True if the user asked for some of the cells or for fewer seeds: too little for a verdict."""

    @property
    def full_name(self) -> str:
        """The name and the profile, as in a command."""
        return f"{self.name} --profile {self.profile}" if self.profile else self.name

    @property
    def all_cells(self) -> list[Cell | ComputedCell]:
        """The cells that train, then the computed cells."""
        return [*self.cells, *self.computed]


def names(wanted: str, profile: str | None) -> list[str]:
    """Return the rows that ``all`` stands for at this size, or the one row that is wanted."""
    every = CLAIMS if profile == "cpu" else ORDER
    return list(every) if wanted == "all" else [wanted]


def row(
    name: str,
    profile: str | None,
    overrides: Sequence[str] = (),
    runs_dir: str | None = None,
    seeds: Sequence[int] | None = None,
    only: str = "",
) -> BenchmarkRow:
    """Return the row of conf/benchmark/NAME.yaml, or of a file of the user's own.

    Args:
        name: Name of the benchmark, or the path of its file.
        profile: The size; None: the first profile.
        overrides: Overrides of every cell.
        runs_dir: Where run directories go; None: ``runs/NAME``.
        seeds: Replace the seeds of the benchmark.
        only: Leave out cells whose labels do not begin with this text.

    Raises:
        UsageError: The benchmark or the profile does not exist, the file is not valid or has no
            cells, no label begins with ``only``, or the tuning had one of the seeds.
    """
    benchmark = schema.load(name)
    if not benchmark.overrides and not benchmark.computed:
        command = "python -m benchmarks.contest study" if benchmark.baseline else "kfac-bench try"
        raise UsageError(f"{name} has no cells: {command} makes its runs")
    check(benchmark, name)
    label, sized = schema.profile_of(benchmark, profile)
    if benchmark.tuning is not None and (used := {*benchmark.tuning.seeds} & {*(seeds or ())}):
        raise UsageError(f"--seeds {min(used)}: the tuning chose the settings with this seed")
    folder = runs_dir or f"runs/{schema.stem(name)}"
    cells = grid.cells(benchmark, folder, seeds, profile, overrides)
    chosen = [cell for cell in cells if cell.label.startswith(only)]
    if only and not chosen:
        some = ", ".join(cell.label for cell in cells[:3])
        raise UsageError(f"--only {only}: no cell begins with this text; cells are {some}, ...")
    has_fewer_seeds = seeds is not None and len(set(seeds)) < len(schema.seeds_of(benchmark, sized))
    return BenchmarkRow(
        name,
        benchmark,
        label,
        sized,
        [cell for cell in chosen if schema.may_run(benchmark, cell.point)],
        computed.cells(benchmark, folder),
        Path(folder),
        overrides,
        [cell.label for cell in chosen if not schema.may_run(benchmark, cell.point)],
        is_part=len(chosen) < len(cells) or has_fewer_seeds,
    )


def check(benchmark: Benchmark, name: str) -> None:
    """Raise :class:`UsageError` for what would have no number, or a wrong one."""
    axes, above = axes_of(benchmark), list[str]()
    grids = [(benchmark.each, axes), *((p.each, axes) for p in benchmark.profiles.values())]
    for each_of, own_axes in (*grids, *((part.each, part.axes) for part in benchmark.computed)):
        for joined, by_value in each_of.items():
            names = joined.split(" ")
            _check_known(f"{name}: each", names, own_axes)
            values = [own_axes[axis] for axis in names]
            known = [" ".join(point) for point in itertools.product(*values)]
            _check_known(f"{name}: each: {joined}", by_value, known)
    for quantity, each in benchmark.quantities.items():
        where = f"{name}: quantities: {quantity}"
        if each.of and each.of not in above:
            raise UsageError(f"{where}: of: {each.of} is no quantity above this one")
        if each.of and each.how not in HOW:
            raise UsageError(f"{where}: how: {each.how!r}: choose one of {', '.join(HOW)}")
        if not each.of and not exists(each.measure):
            hint = did_you_mean(each.measure, MEASURES)
            raise UsageError(f"{where}: measure: {each.measure!r} is no measure{hint}")
        for axis, values in (*each.times.items(), *each.only.items()):
            _check_known(f"{where}: {axis}", values, axes.get(axis, ()))
        for axis, value in (*each.against.items(), *each.level_of.items()):
            if value not in (*axes.get(axis, ()), LEAST):
                raise UsageError(f"{where}: {axis}: {value}: no axis has this value")
        above.append(quantity)
    if (table := benchmark.matrix) is not None:
        _check_known(f"{name}: matrix: quantities", table.quantities, above)
        _check_known(f"{name}: matrix", [table.rows, table.columns], axes)
        if left := [axis for axis in axes if axis not in (table.rows, table.columns)]:
            raise UsageError(f"{name}: matrix: the axis {left[0]} has no place in rows and columns")
    if (drawn := benchmark.figure) is not None:
        _check_known(f"{name}: figure: quantities", drawn.quantities, above)
        named = [drawn.x, drawn.colour, drawn.compared or drawn.colour]
        _check_known(f"{name}: figure", named, [*axes, "quantity"])
        if drawn.lines and not all(value.isdecimal() for value in axes.get(drawn.x, [""])):
            raise UsageError(f"{name}: figure: lines: the axis {drawn.x} needs whole numbers")
    published_values(benchmark)
    for claim in benchmark.claims:
        where = f"{name}: claims: {claim.text}"
        if not claim.checks and not claim.not_testable:
            raise UsageError(f"{where}: needs checks:, or the reason in not_testable:")
        for each_check in claim.checks:
            _check_check(each_check, above, axes, where)


def _check_known(where: str, names: Iterable[str], known: Collection[str]) -> None:
    for each in names:
        if each not in known:
            raise UsageError(f"{where}: {each}: choose one of {', '.join(known)}")


def _check_check(each: Check, quantities: Sequence[str], axes: GridAxes, where: str) -> None:
    if each.quantity not in quantities:
        raise UsageError(f"{where}: {each.quantity} is no quantity")
    if each.at_most is None and each.at_least is None:
        raise UsageError(f"{where}: {each.quantity}: needs at_most: or at_least:")
    if any(value not in axes.get(axis, ()) for axis, value in each.at.items()) or (
        each.at.keys() != axes.keys()
    ):
        raise UsageError(f"{where}: {each.quantity}: at: no cell has {each.at}; name all axes")


def run(
    each: BenchmarkRow,
    say: Callable[[str], None],
    *,
    retry: bool = False,
    session: WorkSession | None = None,
) -> int:
    """Compute and train all cells without a result; return how many cells failed.

    With a session, its time limit may leave cells for another call.
    """
    for label in each.left_out:
        say(f"{label} is left out: {schema.NOT_FROZEN}")
    failed, began = 0, time.monotonic()
    for cell in each.computed:
        is_good, text = cell.run()
        failed += not is_good
        if not is_good:
            say(f"{cell.label}: {text}")
    if each.computed:
        took = time.monotonic() - began
        say(f"{each.name}: {len(each.computed)} computed cells in {took:.0f} s")
    try:
        return failed + grid.run_cells(each.cells, say, retry=retry, session=session)
    except TimeIsUp:
        left = cells_left(each, retry=retry)
        say(f"time is up: {left} of {len(each.cells)} cells are left")
    return failed + sum(run_end.failure(cell.path()) is not None for cell in each.cells)


def cells_left(each: BenchmarkRow, *, retry: bool) -> int:
    """Return the number of cells that :func:`run` would run now."""
    return sum(run_end.will_run(cell.path(), retry=retry) for cell in each.cells)


def attempts(each: BenchmarkRow) -> list[Attempt]:
    """Return the state of every cell, from its files alone."""
    return [_attempt(cell) for cell in each.all_cells]


def _attempt(cell: Cell | ComputedCell) -> Attempt:
    path = cell.path()
    try:
        if (why := run_end.failure(path)) is not None:
            state = AttemptState.FAILED if why.has_run else AttemptState.BLOCKED
            return Attempt(cell.label, path, state, reason=why.reason)
        if not (path / EVENTS_FILE).exists():
            return Attempt(cell.label, path, AttemptState.NEW)
        # A computed cell is written as a whole, so only a run can be unfinished. A process that
        # was killed at its start leaves an empty file.
        if isinstance(cell, Cell) and run_end.ended(path) is None:
            return Attempt(cell.label, path, AttemptState.STARTED)
        return Attempt(cell.label, path, AttemptState.DONE, load(path))
    except UsageError as error:
        return Attempt(cell.label, path, AttemptState.FAILED, reason=str(error))


def has_begun(found: Sequence[Attempt]) -> bool:
    """Return whether at least one cell was started."""
    return any(attempt.state is not AttemptState.NEW for attempt in found)


def refuse_new(each: BenchmarkRow, found: Sequence[Attempt]) -> None:
    """Raise :class:`UsageError` if no cell was started."""
    if not has_begun(found):
        command = f"kfac-bench run {each.full_name}"
        raise UsageError(f"{each.name}: no cell was run yet; start with {command}")


def results(each: BenchmarkRow, found: Sequence[Attempt]) -> list[Line]:
    """Return the lines of the row's table. Failed cells are misses, unfinished ones missing."""
    seeds = [cell.seed for cell in each.cells]
    shared = each.folder.parent / "shared"
    phases = load_phases(each.benchmark.quantities, shared, each.profile, seeds)
    by_point = CellRuns(phases=phases)
    for cell, attempt in zip(each.all_cells, found, strict=True):
        key = key_of(cell.point)
        if isinstance(cell, ComputedCell):
            if attempt.run is not None:
                by_point.computed.setdefault(key, []).append(attempt.run)
        elif attempt.state in (AttemptState.DONE, AttemptState.FAILED, AttemptState.BLOCKED):
            by_point.trained.setdefault(key, {})[cell.seed] = attempt.run
    return lines(each.benchmark, by_point, each.sized.level)


def runs_of(found: Sequence[Attempt]) -> list[Run]:
    """Return the runs that trained."""
    runs = [attempt.run for attempt in found if attempt.run is not None]
    return [run for run in runs if not was_computed(run)]
