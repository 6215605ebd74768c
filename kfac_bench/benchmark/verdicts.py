"""The verdicts on the claims of a benchmark, and the numbers behind them.

A verdict follows from the lines of the result table alone. A check holds if the whole 95 % interval
of its number is on the allowed side of the limit. It fails if the whole interval is on the other
side. A claim is supported if all its checks hold, and not supported if one check fails. If an
interval contains its limit, the runs do not decide. If a number is missing, they do not test the
claim.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count, groupby
from types import MappingProxyType

from kfac_bench.benchmark import suite
from kfac_bench.benchmark.result import Line, Measured, how_computed
from kfac_bench.benchmark.schema import Check, Claim, Quantity
from kfac_bench.benchmark.suite import AttemptState, BenchmarkRow
from kfac_bench.output import counted
from kfac_bench.report.tables import Table, Value, seconds, text

MISSED = "missed"
FEWEST_SEEDS = 6
"""Seeds that a median needs: the range of five holds the median with less than 95 %."""


class Verdict(Enum):
    """The verdict of the runs on a claim; the value is the text in the table."""

    SUPPORTED = "supported"
    NOT_SUPPORTED = "not supported"
    NOT_DECIDED = "not decided"
    NOT_TESTABLE = "not testable here"
    NOT_RUN = "not run yet"


class CheckState(Enum):
    """The position of a number relative to its limit; the value is the text in the table.

    The checks of a claim decide its verdict in this order.
    """

    FAILS = "fails"
    NO_NUMBER = "not every seed has a number"
    ONLY_A_BOUND = "open: only an upper bound is known"
    OPEN = "open"
    HOLDS = "holds"
    NOT_RUN = "not run yet"


_ORDER = [*CheckState]
_VERDICTS = {
    CheckState.FAILS: Verdict.NOT_SUPPORTED,
    CheckState.NO_NUMBER: Verdict.NOT_TESTABLE,
    CheckState.ONLY_A_BOUND: Verdict.NOT_DECIDED,
    CheckState.OPEN: Verdict.NOT_DECIDED,
    CheckState.HOLDS: Verdict.SUPPORTED,
}
"""The verdict on a claim, by the state of its deciding check."""


@dataclass(frozen=True)
class CheckedNumber:
    """A check in words: what ran, what it is compared with, their numbers and the limit."""

    what_ran: str
    compared_with: str
    number: str
    other_number: str
    difference: str
    needed: str
    state: CheckState


@dataclass(frozen=True)
class Judgement:
    """A claim with its verdict. ``reason`` says why, or how many seeds decided nothing."""

    claim: Claim
    verdict: Verdict
    numbers: Sequence[CheckedNumber] = ()
    reason: str = ""


def verdict_tables(rows: Sequence[BenchmarkRow]) -> list[Table]:
    """Return the verdicts on all claims of the rows, with the numbers behind them.

    Goals of this repository have a table of their own. Without claims there are no tables.
    """
    # The rows may come in the order in which they run, which is not that of the claims.
    judged = [each for row in sorted(rows, key=lambda row: row.name) for each in _judge_row(row)]
    tables: list[Table] = []
    for title, goal in (("Verdicts on the papers' claims", False), ("Our own goals", True)):
        shown = [line for each in judged if each.claim.goal is goal for line in _lines(each)]
        if shown:
            columns = ["goal" if goal else "claim", *_COLUMNS]
            # The legend is below the first table, where a reader meets its words.
            tables.append(Table(title, columns, shown, () if tables else _NOTES))
    return tables


_COLUMNS = ("K-FAC", "compared with", "difference (95 % interval)", "needed", "verdict")
_NOTES = (
    "A difference of accuracies is in points. All three numbers are means, each rounded.",
    "All other numbers are medians over the seeds. A ratio (x) is the median of the seeds' ratios.",
    "9 of 20 seeds: only 9 seeds reached the accuracy. A miss counts as the worst number.",
    "computed: the number follows from the plan that the ranks execute. No run measured it.",
    "A check holds if its whole interval is within the limit, and fails if all of it is outside.",
    "A claim is supported if all its checks hold, and not supported if one check fails. The first "
    "line of a claim has the check that decides.",
    f"A median of fewer than {FEWEST_SEEDS} seeds decides nothing.",
)


def _lines(each: Judgement) -> list[Sequence[Value]]:
    """Return the lines of a claim, first the one that decides.

    Checks of the same two points share a line.
    """
    claim = each.claim.text
    verdict = f"{each.verdict.value}: {each.reason}" if each.reason else each.verdict.value
    groups = [
        [*checks] for _, checks in groupby(each.numbers, lambda n: (n.what_ran, n.compared_with))
    ]
    groups.sort(key=lambda checks: min(_ORDER.index(check.state) for check in checks))
    lines: list[Sequence[Value]] = []
    for checks in groups:
        own, other = checks[0].what_ran.removeprefix("K-FAC "), checks[0].compared_with
        own = _joined(own, (check.number for check in checks))
        other = _joined(other, (check.other_number for check in checks))
        differences = ", ".join(filter(None, (check.difference for check in checks)))
        needed = ", ".join(check.needed for check in checks)
        lines.append([claim, own, other, differences, needed, verdict])
        claim = verdict = ""  # the other lines of the claim continue the first
    return lines or [[claim, "", "", "", "", verdict]]


def _joined(point: str, numbers: Iterable[str]) -> str:
    shown = ", ".join(filter(None, numbers))
    return f"{point}: {shown}" if shown else point


def _judge_row(row: BenchmarkRow) -> list[Judgement]:
    """Return the verdicts on the claims of a row. They need all cells of the row."""
    claims = row.benchmark.claims
    if not claims:
        return []
    tuning = row.benchmark.tuning
    labels = row.benchmark.labels | (tuning.labels if tuning is not None else {})
    found = suite.attempts(row)
    states = [attempt.state for attempt in found]
    quantities = row.benchmark.quantities
    if row.is_part or AttemptState.NEW in states or AttemptState.STARTED in states:
        return [without_numbers(claim, quantities, labels) for claim in claims]
    failed = [a for a in found if a.state in (AttemptState.FAILED, AttemptState.BLOCKED)]
    if failed:
        # A process may fail because data are missing, which says nothing about a claim.
        why = f"{counted(len(failed), 'cell')} failed, the first: {failed[0].reason}. Use --retry"
        return [Judgement(claim, Verdict.NOT_TESTABLE, reason=why) for claim in claims]
    lines = suite.results(row, found)
    seeds = len({cell.seed for cell in row.cells})
    how = how_computed(row.benchmark)
    return [judge(claim, lines, quantities, seeds, how, labels) for claim in claims]


def without_numbers(
    claim: Claim, quantities: Mapping[str, Quantity], labels: Mapping[str, str]
) -> Judgement:
    """Return the verdict on a claim before all runs have ended: its limits are known already."""
    if claim.not_testable:
        return Judgement(claim, Verdict.NOT_TESTABLE, reason=claim.not_testable)
    numbers = [
        _checked(check, None, [], quantities, CheckState.NOT_RUN, labels) for check in claim.checks
    ]
    return Judgement(claim, Verdict.NOT_RUN, numbers)


def judge(
    claim: Claim,
    lines: Sequence[Line],
    quantities: Mapping[str, Quantity],
    seeds: int,
    how: str = "computed",
    labels: Mapping[str, str] = MappingProxyType({}),
) -> Judgement:
    """Return the verdict on a claim whose runs have ended.

    Args:
        claim: The claim.
        lines: The lines of the table.
        quantities: The quantities of the table, by name.
        seeds: Number of seeds of each cell. A part of the seeds decides nothing.
        how: The word for a number that no run measured.
        labels: Names of the axes' values in the table.
    """
    if claim.not_testable:
        return without_numbers(claim, quantities, labels)
    states, numbers = [], []
    for check in claim.checks:
        line = _line_at(check.quantity, check.at, lines)
        states.append(_state(check, line, seeds))
        number = _checked(check, line, lines, quantities, states[-1], labels)
        if line is not None and line.measured is None:
            number = replace(number, difference=f"{number.difference} ({how})")
        numbers.append(number)
    verdict = _VERDICTS[min(states, key=_ORDER.index, default=CheckState.HOLDS)]
    reason = counted(seeds, "seed") if verdict is Verdict.NOT_DECIDED else ""
    return Judgement(claim, verdict, numbers, reason)


def _checked(
    check: Check,
    line: Line | None,
    lines: Sequence[Line],
    quantities: Mapping[str, Quantity],
    state: CheckState,
    labels: Mapping[str, str],
) -> CheckedNumber:
    quantity = quantities.get(check.quantity, Quantity())
    own = other = ""
    compared_with = _what_ran(quantity.against, labels) if quantity.of else check.quantity
    if quantity.of and state is not CheckState.NOT_RUN:
        # The two numbers beside a mean of differences are means, so that they subtract.
        is_mean = line is not None and _is_mean(line)
        base = {**check.at, **quantity.against}
        own = _number(_line_at(quantity.of, check.at, lines), is_mean=is_mean)
        other = _number(_line_at(quantity.of, base, lines), is_mean=is_mean)
    difference = "" if state is CheckState.NOT_RUN else _difference(line, quantity.how, check)
    needed = f"{_limit(check, quantity.how)} ({state.value})"
    return CheckedNumber(
        _what_ran(check.at, labels), compared_with, own, other, difference, needed, state
    )


def _line_at(quantity: str, point: Mapping[str, str], lines: Sequence[Line]) -> Line | None:
    of = (line for line in lines if line.quantity == quantity)
    return next((line for line in of if dict(line.point) == point), None)


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
    if line is None or interval is None or (measured is not None and measured.seeds < seeds):
        return CheckState.NO_NUMBER
    low, high = interval
    least = -math.inf if check.at_least is None else check.at_least
    most = math.inf if check.at_most is None else check.at_most
    # A missed target is infinite, and never within a limit.
    if low < least or high > most or math.isinf(low) or math.isinf(high):
        is_outside = high < least or low > most or (math.isinf(low) and low == high)
        state = CheckState.FAILS if is_outside else CheckState.OPEN
    elif measured is not None and measured.missed and line.is_difference:
        # Without the miss a bad seed widens the t interval of the mean. A miss moves the difference
        # to the median, which must not make a claim hold.
        state = CheckState.OPEN
    else:
        state = CheckState.HOLDS
    # A number below an upper bound may be below any limit.
    needs_the_number = low > most or (state is CheckState.HOLDS and check.at_least is not None)
    if measured is not None and measured.bounds and needs_the_number:
        return CheckState.ONLY_A_BOUND
    return CheckState.OPEN if _has_few_seeds(line, measured) else state


def _has_few_seeds(line: Line, measured: Measured | None) -> bool:
    if measured is None:
        return False
    # The t interval of a mean knows the number of its seeds, but one seed has no interval.
    return measured.seeds < (2 if _is_mean(line) else FEWEST_SEEDS)


def _is_mean(line: Line) -> bool:
    return line.is_difference and line.measured is not None and not line.measured.missed


def _what_ran(point: Mapping[str, str], labels: Mapping[str, str]) -> str:
    return ", ".join(
        labels.get(value, value if axis == "optimizer" else f"{axis} {value}")
        for axis, value in point.items()
    )


def _number(line: Line | None, *, is_mean: bool) -> str:
    """Write the number of one point, and how many seeds have it if some missed."""
    if line is None or line.ours is None:
        return "no number"
    measured = line.measured
    value = line.ours if measured is None or not is_mean else measured.mean
    shown = _with_unit(value, line.unit)
    if measured is not None and measured.missed:
        shown += f" ({measured.seeds - measured.missed} of {measured.seeds} seeds)"
    return shown


def _difference(line: Line | None, how: str, check: Check) -> str:
    """Write the number of a check with its interval."""
    interval = _interval(line)
    if line is None or interval is None or line.ours is None:
        return "no number"
    limit = check.at_most if check.at_least is None else check.at_least
    unit = "x" if how == "ratio" else line.unit
    low, high = (_digits(end, unit, limit) for end in interval)
    spread = f" ({low} to {high})" if interval[0] != interval[1] else ""
    bound = "at most " if line.measured and line.measured.bounds else ""
    return f"{bound}{_with_unit(line.ours, unit, limit)}{spread}"


def _with_unit(value: float, unit: str, limit: float | None = None) -> str:
    # The legend of the table says that differences are in points.
    suffix = {"": "", "x": "x", "points": ""}.get(unit, f" {unit}")
    return _digits(value, unit, limit) + suffix * math.isfinite(value)


def _digits(value: float, unit: str, limit: float | None = None) -> str:
    """Write two decimals for shares, ratios and points, and three digits for all else."""
    if math.isinf(value):
        return MISSED
    if unit not in ("%", "x", "points"):
        return seconds(value)
    # Two decimals may hide on which side of its limit a number is: 1.002 is more than 1.
    decimals = next(n for n in count(2) if value == limit or round(value, n) != limit)
    return f"{value:.{decimals}f}"


def _limit(check: Check, how: str) -> str:
    limits = [("at least", check.at_least), ("at most", check.at_most)]
    unit = "x" if how == "ratio" else ""
    return " and ".join(
        f"{word} {text(value)}{unit}" for word, value in limits if value is not None
    )
