"""The verdicts on the claims of a benchmark, and the numbers behind them.

A verdict follows from the lines of the result table alone. A check holds if the whole 95 % interval
of its number is on the allowed side of the limit. It fails if the whole interval is on the other
side. A claim is supported if all its checks hold, and not supported if one check fails. If an
interval contains its limit, the runs do not decide. If a number is missing, they do not test the
claim.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from kfac_bench.benchmark import suite
from kfac_bench.benchmark.result import Line, Measured, how_computed
from kfac_bench.benchmark.schema import Check, Claim, Quantity
from kfac_bench.benchmark.suite import AttemptState, BenchmarkRow
from kfac_bench.output import counted
from kfac_bench.report.tables import Table, Value, text

MISSED = "missed"
BEHIND = "The numbers behind the verdicts"
"""The title of the table of numbers."""
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
    """The position of a number relative to its limit; the value is the text in the table."""

    HOLDS = "holds"
    FAILS = "fails"
    OPEN = "open"
    ONLY_A_BOUND = "open: only an upper bound is known"
    NO_NUMBER = "not every seed has a number"
    NOT_RUN = "not run yet"


_HOW_COMPUTED = {
    "computed": "computed from the plan that the ranks execute",
    "simulated": "simulated, not measured",
}
"""The words beside a number that no run measured, by the word of :func:`how_computed`."""


@dataclass(frozen=True)
class CheckedNumber:
    """One row of the table of numbers, in words."""

    what_ran: str
    number: str
    compared_with: str
    difference: str
    needed: str
    state: str


@dataclass(frozen=True)
class Judgement:
    """A claim with its verdict. ``reason`` says why a claim could not be tested."""

    claim: Claim
    verdict: Verdict
    numbers: Sequence[CheckedNumber] = ()
    reason: str = ""


def verdict_tables(rows: Sequence[BenchmarkRow]) -> list[Table]:
    """Return the verdicts on all claims of the rows, and the numbers behind them.

    Goals of this repository have a table of their own. Without claims there are no tables.
    """
    # The rows may come in the order in which they run, which is not that of the claims.
    judged = [each for row in sorted(rows, key=lambda row: row.name) for each in _judge_row(row)]
    tables = []
    for title, goal in (("Verdicts on the papers' claims", False), ("Our own goals", True)):
        if shown := [each for each in judged if each.claim.goal is goal]:
            tables.append(
                Table(title, ["claim", "verdict"], [_verdict_row(each) for each in shown])
            )
    behind: list[Sequence[Value]] = [
        [
            "our goal: " * each.claim.goal + (each.claim.name or each.claim.text),
            *vars(number).values(),
        ]
        for each in judged
        for number in each.numbers
    ]
    if behind:
        columns = ["claim", "what ran", "its number", "compared with"]
        columns += ["difference or ratio", "needed", "verdict"]
        tables.append(Table(BEHIND, columns, behind, [_NOTE]))
    return tables


_NOTE = (
    "Over seeds, with a 95 % interval in brackets: of a difference the mean of the seeds' "
    "differences (t interval), of every other number the median. A claim is supported "
    "if each interval is within its limit, and not supported if one interval is outside. "
    f"A median of fewer than {FEWEST_SEEDS} seeds decides nothing"
)


def _verdict_row(each: Judgement) -> list[Value]:
    reason = f": {each.reason}" if each.reason else ""
    return [each.claim.text, each.verdict.value + reason]


def _judge_row(row: BenchmarkRow) -> list[Judgement]:
    """Return the verdicts on the claims of a row. They need all cells of the row."""
    claims = row.benchmark.claims
    if not claims:
        return []
    labels = row.benchmark.tuning.labels if row.benchmark.tuning is not None else {}
    found = suite.attempts(row)
    states = [attempt.state for attempt in found]
    quantities = row.benchmark.quantities
    if row.is_part or AttemptState.NEW in states or AttemptState.STARTED in states:
        return [without_numbers(claim, labels) for claim in claims]
    failed = [a for a in found if a.state in (AttemptState.FAILED, AttemptState.BLOCKED)]
    if failed:
        # A process may fail because data are missing, which says nothing about a claim.
        why = f"{counted(len(failed), 'cell')} failed, the first: {failed[0].reason}. Use --retry"
        return [Judgement(claim, Verdict.NOT_TESTABLE, reason=why) for claim in claims]
    lines = suite.results(row, found)
    seeds = len({cell.seed for cell in row.cells})
    how = _HOW_COMPUTED[how_computed(row.benchmark)]
    return [judge(claim, lines, quantities, seeds, how, labels) for claim in claims]


def without_numbers(claim: Claim, labels: Mapping[str, str]) -> Judgement:
    """Return the verdict on a claim before all runs have ended: its limits are known already."""
    if claim.not_testable:
        return Judgement(claim, Verdict.NOT_TESTABLE, reason=claim.not_testable)
    state = CheckState.NOT_RUN.value
    numbers = [
        CheckedNumber(_what_ran(check.at, labels), "", check.quantity, "", _limit(check), state)
        for check in claim.checks
    ]
    return Judgement(claim, Verdict.NOT_RUN, numbers)


def judge(
    claim: Claim,
    lines: Sequence[Line],
    quantities: Mapping[str, Quantity],
    seeds: int,
    how: str = _HOW_COMPUTED["computed"],
    labels: Mapping[str, str] = MappingProxyType({}),
) -> Judgement:
    """Return the verdict on a claim whose runs have ended.

    Args:
        claim: The claim.
        lines: The lines of the table.
        quantities: The quantities of the table, by name.
        seeds: Number of seeds of each cell. A part of the seeds decides nothing.
        how: Where a number comes from that no run measured.
        labels: Names of optimizers in the table.
    """
    if claim.not_testable:
        return without_numbers(claim, labels)
    states, numbers = [], []
    for check in claim.checks:
        line = _line_at(check.quantity, check.at, lines)
        states.append(_state(check, line, seeds))
        numbers.append(_checked(check, line, lines, quantities, states[-1], how, labels))
    if CheckState.FAILS in states:
        verdict = Verdict.NOT_SUPPORTED
    elif CheckState.NO_NUMBER in states:
        verdict = Verdict.NOT_TESTABLE
    elif not all(state is CheckState.HOLDS for state in states):
        verdict = Verdict.NOT_DECIDED
    else:
        verdict = Verdict.SUPPORTED
    return Judgement(claim, verdict, numbers)


def _checked(
    check: Check,
    line: Line | None,
    lines: Sequence[Line],
    quantities: Mapping[str, Quantity],
    state: CheckState,
    how: str,
    labels: Mapping[str, str],
) -> CheckedNumber:
    quantity = quantities.get(check.quantity, Quantity())
    own = other = ""
    if quantity.of:
        own = f"{quantity.of}: {_number(_line_at(quantity.of, check.at, lines))}"
        base = _number(_line_at(quantity.of, {**check.at, **quantity.against}, lines))
        other = f"{_what_ran(quantity.against, labels)}: {base}"
    number = _number(line, with_interval=True)
    if line is not None and line.measured is None:
        number += f" ({how})"
    said = state.value
    if state is CheckState.OPEN and line is not None and line.measured is not None:
        said += f": {counted(line.measured.seeds, 'seed')}"
    what_ran = _what_ran(check.at, labels)
    return CheckedNumber(what_ran, own, other or check.quantity, number, _limit(check), said)


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
    is_mean = line.is_difference and not measured.missed
    return measured.seeds < (2 if is_mean else FEWEST_SEEDS)


def _what_ran(point: Mapping[str, str], labels: Mapping[str, str]) -> str:
    return "; ".join(
        labels.get(value, value) if axis == "optimizer" else f"{axis} {value}"
        for axis, value in point.items()
    )


def _number(line: Line | None, *, with_interval: bool = False) -> str:
    interval = _interval(line)
    if line is None or interval is None or line.ours is None:
        return "no number"
    unit = f" {line.unit}" if line.unit and math.isfinite(line.ours) else ""
    low, high = (_end(end) for end in interval)
    spread = f" ({low} to {high})" if with_interval and low != high else ""
    bound = "at most " if line.measured and line.measured.bounds else ""
    return f"{bound}{_end(line.ours)}{unit}{spread}"


def _end(value: float) -> str:
    return MISSED if math.isinf(value) else text(value)


def _limit(check: Check) -> str:
    limits = [("at least", check.at_least), ("at most", check.at_most)]
    return " and ".join(f"{word} {text(value)}" for word, value in limits if value is not None)
