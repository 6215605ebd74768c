"""The tables of a benchmark: our numbers beside the published ones, its cells, and its verdicts.

A verdict on a claim of a paper follows from the lines of the result table alone. A check holds if
the whole 95 % interval of its number is on the allowed side of the limit. It fails if the whole
interval is on the other side. A claim is supported if all its checks hold, and not supported if one
check fails. If an interval contains its limit, the runs do not decide. If a number is missing, they
do not test the claim.
"""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kfac_bench.benchmark import suite
from kfac_bench.benchmark.grid import joined_axes, options_of_value
from kfac_bench.benchmark.result import Line, Measured, PublishedValue, axes_of, how_computed
from kfac_bench.benchmark.schema import Benchmark, BenchmarkProfile, Check, Claim
from kfac_bench.benchmark.suite import Attempt, AttemptState, BenchmarkRow
from kfac_bench.output import counted
from kfac_bench.record.runs import plain, was_computed
from kfac_bench.record.score import status
from kfac_bench.report.tables import DASH, Link, Table, Value, text

MISSED = "missed"


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
    value: Value = MISSED if math.isinf(measured.median) else measured.median
    if measured.bounds and math.isfinite(measured.median):
        value = f"at most {text(measured.median)}"
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
    names = [spec.rows, *(f"{quantity}, {value}" for quantity, value in columns)]
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
        link = Link(each.path.name, os.path.relpath(each.run.path, folder.resolve()))
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


class Verdict(Enum):
    """The verdict of the runs on a claim; the value is the text in the table."""

    SUPPORTED = "supported"
    NOT_SUPPORTED = "not supported"
    NOT_DECIDED = "not decided"
    NOT_TESTABLE = "not testable here"
    NOT_RUN = "not run yet"


class CheckState(Enum):
    """The position of a number relative to its limit; the value is the text in the table."""

    HOLDS = "holds"
    FAILS = "fails"
    OPEN = "not decided"
    ONLY_A_BOUND = "only an upper bound is known"
    NO_NUMBER = "not every seed has a number"


_HOW_COMPUTED = {
    "computed": "computed from the plan that the ranks execute, not measured",
    "simulated": "simulated, not measured",
}
"""By :func:`how_computed`, the words beside a number that no run measured."""


@dataclass(frozen=True)
class Judgement:
    """A claim with its verdict, and the numbers behind the verdict in words."""

    claim: str
    verdict: Verdict
    numbers: str


def verdicts(rows: Sequence[BenchmarkRow]) -> Table | None:
    """Return the verdicts on all claims of the rows; None if the rows have no claims."""
    shown: list[Sequence[Value]] = []
    # The rows may come in the order in which they run, which is not that of the claims.
    for row in sorted(rows, key=lambda row: row.name):
        for judged in _judge_row(row) if row.benchmark.claims else []:
            shown.append([judged.claim, judged.verdict.value, judged.numbers])
    if not shown:
        return None
    note = (
        "Medians over seeds with their 95 % interval. A claim is supported if each whole interval "
        "is within its limit. It is not supported if one whole interval is outside. Otherwise it "
        "is not decided. Before all cells of a row have run, only the limits are shown"
    )
    return Table("Verdicts on the claims", ["claim", "verdict", "numbers"], shown, [note])


def _judge_row(row: BenchmarkRow) -> list[Judgement]:
    """Return the verdicts on the claims of a row. They need all cells of the row."""
    found = suite.attempts(row)
    states = [attempt.state for attempt in found]
    claims = row.benchmark.claims
    if row.is_part or AttemptState.NEW in states or AttemptState.STARTED in states:
        return [without_numbers(claim) for claim in claims]
    failed = [a for a in found if a.state in (AttemptState.FAILED, AttemptState.BLOCKED)]
    if failed:
        # A process may fail because data are missing, which says nothing about a claim.
        why = f"{counted(len(failed), 'cell')} failed, the first: {failed[0].reason}. Use --retry"
        return [Judgement(claim.text, Verdict.NOT_TESTABLE, why) for claim in claims]
    lines = suite.results(row, found)
    seeds = len({cell.seed for cell in row.cells})
    how = _HOW_COMPUTED[how_computed(row.benchmark)]
    return [judge(claim, lines, seeds, how) for claim in claims]


def without_numbers(claim: Claim) -> Judgement:
    """Return the verdict on a claim before all runs have ended: its limits are known already."""
    if claim.not_testable:
        return Judgement(claim.text, Verdict.NOT_TESTABLE, claim.not_testable)
    limits = "; ".join(f"{_name(check)}: {_limit(check)}" for check in claim.checks)
    return Judgement(claim.text, Verdict.NOT_RUN, limits)


def judge(
    claim: Claim, lines: Sequence[Line], seeds: int, how: str = _HOW_COMPUTED["computed"]
) -> Judgement:
    """Return the verdict on a claim whose runs have ended.

    Args:
        claim: The claim.
        lines: The lines of the table.
        seeds: Number of seeds of each cell. A part of the seeds decides nothing.
        how: Where a number comes from that no run measured.
    """
    if claim.not_testable:
        return without_numbers(claim)
    pairs = [(check, _line_of(check, lines)) for check in claim.checks]
    states = [_state(check, line, seeds) for check, line in pairs]
    if CheckState.FAILS in states:
        verdict = Verdict.NOT_SUPPORTED
    elif CheckState.NO_NUMBER in states:
        verdict = Verdict.NOT_TESTABLE
    elif not all(state is CheckState.HOLDS for state in states):
        verdict = Verdict.NOT_DECIDED
    else:
        verdict = Verdict.SUPPORTED
    numbers = "; ".join(
        f"{_name(check)}: {_check_number(line, how)}, limit {_limit(check)}: {state.value}"
        for (check, line), state in zip(pairs, states, strict=True)
    )
    return Judgement(claim.text, verdict, numbers)


def _line_of(check: Check, lines: Sequence[Line]) -> Line | None:
    of = (line for line in lines if line.quantity == check.quantity)
    return next((line for line in of if dict(line.point) == check.at), None)


def _interval(line: Line | None) -> tuple[float, float] | None:
    """Return the ends of the interval. A computed number is exact."""
    if line is None:
        return None
    if line.measured is not None:
        return line.measured.low, line.measured.high
    return None if line.computed is None else (line.computed, line.computed)


def _state(check: Check, line: Line | None, seeds: int) -> CheckState:
    interval = _interval(line)
    measured = None if line is None else line.measured
    if interval is None or (measured is not None and measured.seeds < seeds):
        return CheckState.NO_NUMBER
    low, high = interval
    least = -math.inf if check.at_least is None else check.at_least
    most = math.inf if check.at_most is None else check.at_most
    # A missed target is infinite, and never within a limit.
    if low < least or high > most or math.isinf(low) or math.isinf(high):
        is_outside = high < least or low > most or (math.isinf(low) and low == high)
        state = CheckState.FAILS if is_outside else CheckState.OPEN
    else:
        state = CheckState.HOLDS
    # A number below an upper bound may be below any limit.
    needs_the_number = low > most or (state is CheckState.HOLDS and check.at_least is not None)
    if measured is not None and measured.bounds and needs_the_number:
        return CheckState.ONLY_A_BOUND
    return state


def _name(check: Check) -> str:
    return f"{check.quantity} ({', '.join(check.at.values())})" if check.at else check.quantity


def _check_number(line: Line | None, how: str) -> str:
    interval = _interval(line)
    if line is None or interval is None or line.ours is None:
        return "no number"
    unit = f" {line.unit}" if line.unit else ""
    low, high = (_interval_text(end) for end in interval)
    spread = "" if low == high else f" ({low} {DASH} {high})"
    bound = "at most " if line.measured and line.measured.bounds else ""
    origin = "" if line.measured else f" ({how})"
    return f"{bound}{_interval_text(line.ours)}{unit}{spread}{origin}"


def _interval_text(value: float) -> str:
    return MISSED if math.isinf(value) else text(value)


def _limit(check: Check) -> str:
    limits = [("at least", check.at_least), ("at most", check.at_most)]
    return " and ".join(f"{word} {text(value)}" for word, value in limits if value is not None)
