"""The page docs/lab/faults.md: a row for each fault."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any

from kfac_bench.report.tables import Table, Value, text
from tests.reliability.faults.case import CHECKPOINT_FREQ, STEPS
from tests.reliability.faults.fault import FEW
from tests.reliability.faults.matrix import Outcome

MOST_SAID = 60
"""Characters of a message in the table."""
_PLACE = re.compile(
    r"(kfac-train: )?(rank \d+: )?"
    r"(failed at step \d+ after [\d.]+ s of training(, squared_error [\d.]+)?: )?"
)
"""The beginning of a message that says where the run was, and not what went wrong."""
COLUMNS = (
    "fault",
    "ranks",
    "survived",
    "how",
    "steps lost",
    "seconds to resume",
    "same weights",
    "message",
)


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return a row for each fault. A failure of a method becomes a note."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.fault.name, []).append(outcome)
    notes = [
        f"{o.fault.name}, {o.ranks} ranks, {o.method}: {o.wrong or 'not tried: ' + o.not_here}"
        for o in outcomes
        if o.wrong or o.not_here
    ]
    return Table("What happens to a run", COLUMNS, [_row(g) for g in groups.values()], notes)


def _row(group: Sequence[Outcome]) -> list[Value]:
    numbers = dict.fromkeys(o.ranks for o in group)
    columns = zip(*(_cells([o for o in group if o.ranks == n]) for n in numbers), strict=True)
    # A value that holds for all numbers of ranks is written once.
    cells = [", ".join(dict.fromkeys(map(text, column))) for column in columns]
    return [group[0].fault.name, *cells, next((_brief(o.said) for o in group if o.said), None)]


def _cells(group: Sequence[Outcome]) -> list[Value]:
    """Return the cells of a fault with one number of ranks, without fault and message."""
    first = group[0]
    tried = [o for o in group if not o.not_here]
    lost = sorted({o.lost_steps for o in tried})
    seconds = [o.resume_s for o in tried if o.resume_s is not None]
    return [
        first.ranks,
        _share(tried, [not o.wrong for o in tried]),
        " or ".join(sorted({_how(o) for o in tried})),
        f"{lost[0]} to {lost[-1]}" if len(lost) > 1 else str(lost[0]) if lost else None,
        statistics.median(seconds) if seconds else None,
        _share(tried, [o.identical for o in tried])
        + ("" if first.fault.exact else " (arithmetic)"),
    ]


def _brief(said: str) -> str:
    cause = _PLACE.sub("", said, count=1)
    return cause if len(cause) <= MOST_SAID else f"{cause[:MOST_SAID]} ..."


def _how(outcome: Outcome) -> str:
    if outcome.again:
        return "same command again"
    return "torchrun starts it again" if outcome.resume_s is not None else "goes on"


def _share(outcomes: Sequence[Outcome], good: Iterable[bool]) -> str:
    return f"{sum(good)}/{len(outcomes)}"


def page(
    outcomes: Sequence[Outcome], about: dict[str, Any], today: date, imports_s: float, cost: Table
) -> str:
    """Return the whole page. `about` comes from `kfac_bench.training.environment.describe`."""
    methods = list(dict.fromkeys(o.method for o in outcomes))
    tried = [o for o in outcomes if not o.not_here]
    wrong = sum(bool(o.wrong) for o in tried)
    hardware = about["hardware"]
    versions = ", ".join(f"{k} {about['versions'][k]}" for k in ("kfac_bench", "torch", "python"))
    return f"""# What happens to a run when something goes wrong

{len(tried)} real runs of `kfac-train` (gloo, CPU) met a fault: {len(tried) - wrong} ended as they
should, {wrong} did not. [Reliability](../explanation/reliability.md) has a summary.

`make faults ARGS="--out docs/lab/faults.md"` wrote this page on {today.isoformat()}:
{versions}, commit {about["git_commit"][:12] or "unknown"};
{hardware["cpu"]}, {hardware["cpu_count"]} cores, {hardware["system"]}.

Each run has {STEPS} steps of an autoencoder on digits and a
checkpoint every {CHECKPOINT_FREQ} steps. The fault comes at the seventh step, unless its row says
otherwise. A method is SGD alone, or K-FAC with a strategy:
{", ".join(methods)}.
Faults that K-FAC cannot change, for example between two starts, were tried with
{" and ".join(FEW)} only.

* **ranks**: The numbers of ranks with which the fault was tried. If another cell has two values,
  the first is for one rank, and the second for two ranks.
* **survived**: How many of the methods reached the end of the run. They repeated at most the steps
  since the last good checkpoint. No rank hung. Only an error of the program showed a traceback.
* **how**: "goes on" means that the run continued by itself. "same command again" means that the run
  ended, and the same command continued from the last good checkpoint. Before that, a full or
  read-only disk and a corrupt image were repaired.
* **seconds to resume**: The median time from the second start to the first new step. It leaves out
  the imports of Python's modules ({imports_s:.1f} s of processor time), except where torchrun
  restarts the run.
* **same weights**: How many of the methods ended with the same weights (SHA-256) as without the
  fault. "(arithmetic)" means that the fault changes what is computed.
* **message**: The beginning of the line that explains most, without the rank and the step.

A rank sends the signal to itself at the named place, or
[inject.py](../../tests/reliability/faults/inject.py) replaces a function before the rank starts.
Full and read-only disks are small tmpfs. The last rank meets the fault, unless the row names
another rank. Ranks start without torchrun, as with `srun`, and read data without loader workers,
unless the row says otherwise.

{_without_title(table(outcomes))}

## What a checkpoint costs

A step copies the state. A thread then hashes, writes and syncs the copy while training goes on.
The table shows processor time for float32 states. By default a run writes at most one checkpoint
per minute.

{_without_title(cost)}"""


def _without_title(shown: Table) -> str:
    return "\n".join(shown.markdown().splitlines()[2:])
