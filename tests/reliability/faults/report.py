"""docs/reliability.md: one line for each fault and number of ranks, over all methods."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any

from kfac_bench.report.tables import Table, Value
from tests.reliability.faults.case import CHECKPOINT_FREQ, STEPS
from tests.reliability.faults.inject import STEP_S
from tests.reliability.faults.matrix import Outcome

MOST_SAID = 150
COLUMNS = (
    *("fault", "ranks", "survived", "how", "steps lost", "seconds to resume"),
    *("same weights", "what it says"),
)


def table(outcomes: Sequence[Outcome]) -> Table:
    """A row for each fault and number of ranks; what is wrong with a method is a note."""
    groups: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.fault.name, outcome.ranks), []).append(outcome)
    notes = [
        f"{o.fault.name}, {o.ranks} ranks, {o.method}: {o.wrong or 'not tried: ' + o.not_here}"
        for o in outcomes
        if o.wrong or o.not_here
    ]
    return Table("What becomes of a run", COLUMNS, [_row(g) for g in groups.values()], notes)


def _row(group: Sequence[Outcome]) -> list[Value]:
    first = group[0]
    tried = [o for o in group if not o.not_here]
    lost = sorted({o.lost_steps for o in tried})
    seconds = [o.resume_s for o in tried if o.resume_s is not None]
    return [
        first.fault.name,
        first.ranks,
        _share(tried, [not o.wrong for o in tried]),
        " or ".join(sorted({_how(o) for o in tried})),
        f"{lost[0]} to {lost[-1]}" if len(lost) > 1 else str(lost[0]) if lost else None,
        statistics.median(seconds) if seconds else None,
        _share(tried, [o.identical for o in tried])
        + ("" if first.fault.exact else " (arithmetic)"),
        next((o.said[:MOST_SAID] for o in tried if o.said), None),
    ]


def _how(outcome: Outcome) -> str:
    if outcome.again:
        return "same command again"
    return "torchrun starts it again" if outcome.resume_s is not None else "goes on"


def _share(outcomes: Sequence[Outcome], good: Iterable[bool]) -> str:
    return f"{sum(good)}/{len(outcomes)}"


def page(
    outcomes: Sequence[Outcome], about: dict[str, Any], today: date, imports_s: float, cost: Table
) -> str:
    """The whole document; ``about`` is :func:`kfac_bench.training.environment.describe`'s."""
    methods = list(dict.fromkeys(o.method for o in outcomes))
    tried = [o for o in outcomes if not o.not_here]
    wrong = sum(bool(o.wrong) for o in tried)
    hardware = about["hardware"]
    versions = ", ".join(f"{k} {about['versions'][k]}" for k in ("kfac_bench", "torch", "python"))
    return f"""# What becomes of a run that something happens to

`make faults ARGS="--out docs/reliability.md"` wrote this page on {today.isoformat()}:
{versions}, commit {about["git_commit"][:12] or "unknown"};
{hardware["cpu"]}, {hardware["cpu_count"]} cores, {hardware["system"]}.

{len(tried)} real runs of `kfac-train` (gloo, CPU) met a fault: {len(tried) - wrong} ended as they
should, {wrong} did not. Methods: {", ".join(methods)}; the table counts them.
Each run is {STEPS} steps of an autoencoder on digits, of {STEP_S * 1000:.0f} ms at least, with a
checkpoint every {CHECKPOINT_FREQ} steps; the fault comes at the seventh, or where the line says.

* **survived**: the run came to its end, with at most the steps since the last good checkpoint made
  again, no rank hung, and nobody saw a traceback (but of an error of the program itself).
* **how**: it goes on by itself; or it ends, and the same command goes on from the last good
  checkpoint. Where a disk was full or read-only or a file corrupt, that was mended first.
* **seconds to resume**: the median from the second start to the first new step, without the
  imports of Python's modules: {imports_s:.1f} s of a processor more. Where torchrun starts it again
  they are in it. Other work on the machine is in these seconds, too.
* **same weights**: SHA-256 of all weights at the end, held against the run that nothing happened
  to; "(arithmetic)": the fault changes what is computed.
* Ranks are started by hand, as `srun` does it, but where the line says torchrun. A signal comes
  from inside the rank at that very place, an error or a NaN from one function that is changed
  before the rank starts ([inject.py](../tests/reliability/faults/inject.py)); disks
  are small tmpfs. The last rank meets it, unless the line says another.

{_without_title(table(outcomes))}

## What a checkpoint costs

It is written beside the training: a copy of the state in the step, then a thread that hashes,
writes and syncs. Processor time, of float32 state of some sizes; one a minute is the default.

{_without_title(cost)}"""


def _without_title(shown: Table) -> str:
    return "\n".join(shown.markdown().splitlines()[2:])
