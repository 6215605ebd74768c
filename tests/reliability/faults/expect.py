"""Expectations: what a start must print, return and record. A missed one fails the row.

The matrix itself judges the final weights, tracebacks and hung ranks. These functions check one
start of a case, which the final state of the run does not show.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from kfac_bench.record.events import Event, read
from tests.reliability.faults.case import Case
from tests.reliability.faults.launch import Ended


class UnexpectedError(Exception):
    """An error that says what a start did that it should not have done."""


def codes(ended: Ended, allowed: Collection[int]) -> None:
    """Check that every rank ended by itself with an exit code of `allowed`."""
    if not set(ended.codes) <= set(allowed):
        shown = ", ".join(map(str, sorted(allowed)))
        raise UnexpectedError(f"exit codes {ended.codes}, expected {shown}: {_last_line(ended)}")


def line(ended: Ended, pattern: str, times: int = 1) -> None:
    """Check that the ranks printed a line that contains `pattern`, so many times."""
    lines = [x for x in (ended.out + ended.errors).splitlines() if re.search(pattern, x)]
    if len(lines) != times:
        raise UnexpectedError(f"{len(lines)} lines (expected {times}) with {pattern!r}")


def recorded(case: Case, kind: type[Event], times: int = 1) -> None:
    """Check that the record has so many events of this kind."""
    count = sum(isinstance(event, kind) for event in read(case.events))
    if count != times:
        raise UnexpectedError(f"{count} events {kind.__name__}, expected {times}")


def finished_record(case: Case, status: str) -> None:
    """Check that the record's last event and the file `state` say how the start ended."""
    state = (case.path / "state").read_text().split()[0]
    if (case.status(), state) != (status, status):
        raise UnexpectedError(
            f"RunEnded says {case.status()}, the file state says {state}, expected {status}"
        )


def _last_line(ended: Ended) -> str:
    return (ended.errors or ended.out).strip().rpartition("\n")[2]
