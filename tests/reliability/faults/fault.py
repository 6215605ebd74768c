"""A row of the matrix, and what the files with rows share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.reliability.faults import launch
from tests.reliability.faults.case import CHECKPOINT_FREQ, METHODS, Case

AT = 7
"""The update at which most faults happen, a few steps after a checkpoint."""
LATE = 11
"""An update after two checkpoints."""
FEW = ("SGD", "mem_opt")
"""Methods for faults that K-FAC cannot change, for example between two starts."""
WORKERS = ("data.workers=2",)
KEEP_ALL = ("trainer.keep_last=3",)
"""Keeps every checkpoint of a run, so that the matrix looks for the event of each one."""


class NotHereError(Exception):
    """An error that says why this machine cannot try a fault."""


@dataclass(frozen=True)
class Fault:
    """A row of the table. `act` starts the run with the fault."""

    name: str
    act: Callable[[Case], None]
    ranks: tuple[int, ...] = (1, 2)
    exact: bool = True
    """The fault changes no arithmetic: the final weights must equal those without a fault."""
    kfac: bool = False
    """The fault needs K-FAC."""
    lost: int = CHECKPOINT_FREQ
    """Number of steps that may be repeated."""
    crash: bool = False
    """The fault is an error of the program, which must print its traceback."""
    options: tuple[str, ...] = ()
    pictures: bool = False
    """The run must read its data from files."""
    methods: tuple[str, ...] = tuple(METHODS)
    """The methods to try."""


def starts(kind: str, *, at: int = AT, last: bool = True) -> Callable[[Case], None]:
    """Return an action that injects the fault into the last rank, or into rank 0."""

    def act(case: Case) -> None:
        case.start(kind, at, case.ranks - 1 if last else 0)

    return act


def mount(case: Case, options: Sequence[str] = ()) -> None:
    """Mount a small disk for the runs of the case."""
    if not case.mounted("2m", options):
        raise NotHereError(
            "mounting a small disk needs root: unshare -rm python -m tests.reliability.faults"
        )


def wait_until(true: Callable[[], bool]) -> None:
    """Wait until the function returns true."""
    deadline = time.monotonic() + launch.ENDS_S
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError("the expected state did not come")
        time.sleep(0.01)
