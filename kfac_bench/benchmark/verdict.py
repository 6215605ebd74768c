"""Verdicts on the claims of papers, from the lines of result tables alone.

A check holds if the whole 95 % interval of its number is on the allowed side of the limit. It fails
if the whole interval is on the other side. A claim is supported if all its checks hold, and not
supported if one check fails. If an interval contains its limit, the runs do not decide. If a number
is missing, they do not test the claim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kfac_bench.benchmark import suite
from kfac_bench.benchmark.claim import Check, Claim
from kfac_bench.benchmark.result import Line, how_computed
from kfac_bench.benchmark.sheet import MISSED, AttemptState
from kfac_bench.benchmark.suite import BenchmarkRow
from kfac_bench.output import counted
from kfac_bench.report.tables import DASH, Table, Value, text


class Verdict(Enum):
    """What runs say about a claim; the value is the text in the table."""

    SUPPORTED = "supported"
    NOT_SUPPORTED = "not supported"
    NOT_DECIDED = "not decided"
    NOT_TESTABLE = "not testable here"
    NOT_RUN = "not run yet"


class CheckState(Enum):
    """Whether a number is on the allowed side of its limit; the value is the text in the table."""

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


def table(rows: Sequence[BenchmarkRow]) -> Table | None:
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
        f"{_name(check)}: {_number(line, how)}, limit {_limit(check)}: {state.value}"
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


def _number(line: Line | None, how: str) -> str:
    interval = _interval(line)
    if line is None or interval is None or line.ours is None:
        return "no number"
    unit = f" {line.unit}" if line.unit else ""
    low, high = (_text(end) for end in interval)
    spread = "" if low == high else f" ({low} {DASH} {high})"
    bound = "at most " if line.measured and line.measured.bounds else ""
    origin = "" if line.measured else f" ({how})"
    return f"{bound}{_text(line.ours)}{unit}{spread}{origin}"


def _text(value: float) -> str:
    return MISSED if math.isinf(value) else text(value)


def _limit(check: Check) -> str:
    limits = [("at least", check.at_least), ("at most", check.at_most)]
    return " and ".join(f"{word} {text(value)}" for word, value in limits if value is not None)
