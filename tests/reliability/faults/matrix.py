"""The matrix: every fault, on every number of ranks, with every method."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from tests.reliability.faults import pictures
from tests.reliability.faults.case import METHODS, Case
from tests.reliability.faults.expect import UnexpectedError
from tests.reliability.faults.fault import Fault, NotHereError
from tests.reliability.faults.rows import ROWS


@dataclass(frozen=True)
class Outcome:
    """The outcome of one fault on `ranks` ranks with one method."""

    fault: Fault
    ranks: int
    method: str
    again: bool = False
    """The run did not reach its end by itself, so the same command was started again."""
    lost_steps: int = 0
    resume_s: float | None = None
    identical: bool = False
    said: str = ""
    wrong: str = ""
    """What went wrong; empty if nothing did."""
    not_here: str = ""
    """Why this machine cannot try the fault; empty if it can."""


def run(
    faults: Sequence[Fault],
    ranks: Sequence[int],
    methods: Sequence[str],
    say: Callable[[str], None],
    jobs: int = 1,
    kept: Path | None = None,
) -> list[Outcome]:
    """Try all combinations and return their outcomes.

    Args:
        faults: The faults to try.
        ranks: The numbers of ranks.
        methods: The names of methods.
        say: Prints a line for each outcome.
        jobs: The number of runs at a time.
        kept: A file with one outcome per line. Its outcomes are not tried again.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        del os.environ[name]
    todo = list(_combinations(faults, ranks, methods))
    known = {} if kept is None else _read(kept)
    with (
        tempfile.TemporaryDirectory(prefix="kfac-faults-") as scratch,
        ThreadPoolExecutor(jobs) as pool,
    ):
        weights = References(Path(scratch))

        def one(number: int, fault: Fault, world: int, method: str) -> Outcome:
            outcome = known.get((fault.name, world, method))
            if outcome is None:
                folder = Path(scratch) / f"case{number}"
                outcome = try_one(fault, world, method, folder, weights)
                if kept is not None:
                    _append(kept, outcome)
                said = outcome.wrong or outcome.not_here or "good"
                say(f"[{number}/{len(todo)}] {fault.name}, {world} ranks, {method}: {said}")
            return outcome

        return [f.result() for f in [pool.submit(one, i, *t) for i, t in enumerate(todo, 1)]]


def _read(kept: Path) -> dict[tuple[str, int, str], Outcome]:
    known, by_name = {}, {fault.name: fault for fault in ROWS}
    for line in kept.read_text().splitlines() if kept.exists() else []:
        fields = json.loads(line)
        if fields["fault"] in by_name:
            outcome = Outcome(**{**fields, "fault": by_name[fields["fault"]]})
            known[outcome.fault.name, outcome.ranks, outcome.method] = outcome
    return known


def _append(kept: Path, outcome: Outcome) -> None:
    fields = {f.name: getattr(outcome, f.name) for f in dataclasses.fields(outcome)}
    with kept.open("a") as file:
        file.write(json.dumps({**fields, "fault": outcome.fault.name}) + "\n")


def _combinations(
    faults: Sequence[Fault], ranks: Sequence[int], methods: Sequence[str]
) -> Iterator[tuple[Fault, int, str]]:
    for fault in faults:
        for world in ranks:
            for method in methods:
                is_meant = method in fault.methods and not (fault.kfac and method == "SGD")
                if world in fault.ranks and is_meant:
                    yield fault, world, method


_Setting = tuple[int, str, tuple[str, ...], bool]


class References:
    """The final weights of runs without a fault. Each setting runs once."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._known: dict[_Setting, str | None] = {}
        self._locks: defaultdict[_Setting, Lock] = defaultdict(Lock)

    def of(self, fault: Fault, ranks: int, method: str) -> str | None:
        """Return the weights to which a run with the fault must come."""
        own = tuple(o for o in fault.options if o.startswith("trainer.max_steps"))
        key = (ranks, method, own, fault.pictures)
        # Several threads may ask for one setting: the first runs it, the others wait.
        with self._locks[key]:
            if key not in self._known:
                folder = self._scratch / f"reference{list(self._locks).index(key)}"
                case = Case(_emptied(folder), ranks, method, own)
                if fault.pictures:
                    pictures.add(case)
                case.start()
                self._known[key] = case.weights()
            return self._known[key]


def _emptied(folder: Path) -> Path:
    subprocess.run(["umount", "-q", folder / "runs"], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def try_one(fault: Fault, ranks: int, method: str, folder: Path, weights: References) -> Outcome:
    """Inject the fault into a run, continue the run if necessary, and judge the outcome."""
    reference = weights.of(fault, ranks, method)
    case = Case(_emptied(folder), ranks, method, fault.options)
    if fault.pictures:
        pictures.add(case)
    try:
        fault.act(case)
        again = case.weights() is None
        seconds = case.launches[-1].seconds if "restarts" in fault.name else None
        if again:
            case.start()
        if len(case.launches) > 1:
            # Some faults need the check of a second start, so they have started it.
            again, seconds = True, case.launches[-1].seconds
        outcome = Outcome(
            fault,
            ranks,
            method,
            again,
            case.lost_steps(),
            seconds,
            identical=reference is not None and case.weights() == reference,
            said=case.said(),
        )
        return _judged(outcome, case, reference)
    except NotHereError as error:
        return Outcome(fault, ranks, method, not_here=str(error))
    except (TimeoutError, UnexpectedError) as error:
        return Outcome(fault, ranks, method, wrong=str(error))
    finally:
        shutil.rmtree(_emptied(folder))


def _judged(outcome: Outcome, case: Case, reference: str | None) -> Outcome:
    fault, wrong = outcome.fault, []
    if case.missed():
        wrong.append("the fault did not happen")
    if reference is None:
        wrong.append("the run without a fault failed")
    if case.weights() is None:
        wrong.append(f"the run did not go on ({case.status()})")
    if case.traceback() and not fault.crash:
        wrong.append("a traceback")
    if outcome.lost_steps > fault.lost:
        wrong.append(f"{outcome.lost_steps} steps lost")
    if fault.exact and not outcome.identical:
        wrong.append("other weights")
    if missing := case.without_event():
        wrong.append(f"no event of the checkpoint of step {missing[0]}")
    hung = any(None in ended.codes for ended in case.launches)
    if hung and "SIGSTOP" not in fault.name:
        wrong.append("a rank hung")
    return replace(outcome, wrong="; ".join(wrong))


def import_seconds() -> float:
    """Return the processor seconds for the imports that a rank started by hand saves."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    modules = "kfac_bench.training.run, kfac_bench.distributed.backends.ddp, torch._dynamo"
    subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def find(names: Sequence[str]) -> list[Fault]:
    """Return the faults whose names contain one of `names`, or all if `names` is empty."""
    return [f for f in ROWS if not names or any(n.lower() in f.name.lower() for n in names)]


ALL_METHODS = tuple(METHODS)
SHORT = (
    "SIGKILL of another rank",
    "SIGTERM in an evaluation",
    "SIGTERM in a decomposition",
    "SIGSTOP",
    "NaN in one gradient",
    "eigh fails",
    "a flipped bit",
    "quota",
    "a corrupt sample, data",
)
"""Faults for a test: one of each kind, without faults whose launcher starts slowly."""
