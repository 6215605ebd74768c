"""The verdict: whether processes grew, and whether all events reached the file and W&B."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kfac_bench.record.events import Evaluated, Event, RunEnded, Trained
from kfac_bench.report.tables import Table, Value
from tests.reliability.soak.processes import Sample

WARM_UP = 0.25
"""Share of the steps that does not count, because caches fill and buffers find their sizes."""
WINDOWS = 8
"""Number of windows of the other steps. A window's least sample counts, because a checkpoint in
flight needs memory for a short time."""
RANK: Mapping[str, float] = {"resident_mb": 4.0, "open_files": 0.5, "threads": 0.5}
"""Largest growth of a rank over 1,000 steps."""
HELPER: Mapping[str, float] = {"resident_mb": 8.0, "open_files": 2.0, "threads": 2.0}
"""Largest growth of a process that a rank started (W&B's), whose threads depend on its work."""
FINISH_S = 30.0
"""Longest time from the last event to the end, when W&B writes what it has not written yet."""


@dataclass
class Verdict:
    """The rows of a table, each with a bound and whether it holds."""

    rows: list[Sequence[Value]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def add(self, what: str, values: Sequence[Value], bound: str, good: bool) -> None:
        """Add a row.

        Args:
            what: The name of the row.
            values: The value after the warm-up, the value at the end, the growth over 1,000 steps.
            bound: The bound in words.
            good: Whether the bound holds.
        """
        self.rows.append((what, *values, bound, "yes" if good else "NO"))
        if not good:
            self.broken.append(what)

    def processes(self, samples: Iterable[Sample]) -> None:
        """Add a row for each metric of each process: the slope after the warm-up."""
        by_process: dict[str, list[Sample]] = defaultdict(list)
        for each in samples:
            by_process[each.process].append(each)
        last = max((s[-1].step for s in by_process.values()), default=0)
        for process, own in sorted(by_process.items()):
            is_helper = "'" in process
            # A helper that ended early, such as git, cannot grow.
            if is_helper and own[-1].step < (1 + WARM_UP) / 2 * last:
                continue
            for metric, bound in (HELPER if is_helper else RANK).items():
                windows = _windows([(s.step, getattr(s, metric)) for s in own], last)
                what = f"{process}: {metric.replace('_', ' ').replace('mb', 'MB')}"
                if len(windows) < WINDOWS // 2:
                    self.add(what, (None, None, None), f"{WINDOWS // 2} samples", False)
                    continue
                steps, values = zip(*windows, strict=True)
                growth = 1000 * statistics.linear_regression(steps, values).slope
                shown = (values[0], values[-1], growth)
                self.add(what, shown, f"grows by {bound:g} at most", growth <= bound)

    def record(self, events: Sequence[Event], trained: int, evaluated: int) -> None:
        """Add rows for the number of events, and for the end of the run."""
        for kind, expected in ((Trained, trained), (Evaluated, evaluated)):
            count = sum(isinstance(e, kind) for e in events)
            what = f"events.jsonl: {kind.__name__} events"
            self.add(what, (None, count, None), f"{expected:,}", count == expected)
        ended = next((e for e in reversed(events) if isinstance(e, RunEnded)), None)
        status = "no end" if ended is None else f"{ended.status} {ended.message}".strip()
        self.add("run", (None, status, None), "finished", status == "finished")

    def view(self, rows: int, expected: int, finish_s: float) -> None:
        """Add rows for W&B: as many rows as events, and no long wait at the end."""
        self.add("wandb: rows", (None, rows, None), f"{expected:,}", rows == expected)
        what = "seconds from the last event to the end"
        self.add(what, (None, finish_s, None), f"{FINISH_S:g} at most", finish_s <= FINISH_S)

    def table(self, title: str, notes: Sequence[str]) -> Table:
        """Return the rows as a table."""
        columns = ("", "after warm-up", "at the end", "growth per 1,000 steps", "bound", "holds")
        return Table(title, columns, self.rows, notes)


def _windows(points: Sequence[tuple[int, float]], last: int) -> list[tuple[float, float]]:
    """Return the middle step and the least value of each window that has a sample."""
    width = last * (1 - WARM_UP) / WINDOWS
    least: dict[int, float] = {}
    for step, value in points:
        number = min(WINDOWS - 1, int((step - WARM_UP * last) // width)) if width else -1
        if number >= 0:
            least[number] = min(value, least.get(number, value))
    return [(WARM_UP * last + (n + 0.5) * width, value) for n, value in sorted(least.items())]
