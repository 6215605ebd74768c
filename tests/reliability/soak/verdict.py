"""Whether processes stayed level, and the record and its view kept up: a table, and what broke."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kfac_bench.record.events import Evaluated, Event, RunEnded, Trained
from kfac_bench.report.tables import Table, Value
from tests.reliability.soak.processes import Sample

WARM_UP = 0.25
"""Share of the steps that is left out: caches fill, buffers find their sizes."""
WINDOWS = 8
"""Of the rest. Each counts by its least sample: a checkpoint on its way comes and goes."""
RANK: Mapping[str, float] = {"resident_mb": 4.0, "open_files": 0.5, "threads": 0.5}
"""Growth over 1,000 steps that is still level."""
HELPER: Mapping[str, float] = {"resident_mb": 8.0, "open_files": 2.0, "threads": 2.0}
"""The same of what a rank has started (W&B's), whose threads come as there is work."""
FINISH_S = 30.0
"""From the last event to the end of all processes: what W&B has not written yet, it writes then."""


@dataclass
class Verdict:
    """Rows of a table; each says whether its bound holds."""

    rows: list[Sequence[Value]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def add(self, what: str, values: Sequence[Value], bound: str, good: bool) -> None:
        """``values``: after the warm-up, at the end, growth over 1,000 steps."""
        self.rows.append((what, *values, bound, "yes" if good else "NO"))
        if not good:
            self.broken.append(what)

    def processes(self, samples: Iterable[Sample]) -> None:
        """Each figure of each process: its slope after the warm-up, by least squares."""
        by_process: dict[str, list[Sample]] = defaultdict(list)
        for each in samples:
            by_process[each.process].append(each)
        last = max((s[-1].step for s in by_process.values()), default=0)
        for process, found in sorted(by_process.items()):
            helper = "'" in process
            if helper and found[-1].step < (1 + WARM_UP) / 2 * last:
                continue  # it came and went
            for figure, bound in (HELPER if helper else RANK).items():
                windows = _windows([(s.step, getattr(s, figure)) for s in found], last)
                what = f"{process}: {figure.replace('_', ' ').replace('mb', 'MB')}"
                if len(windows) < WINDOWS // 2:
                    self.add(what, (None, None, None), f"{WINDOWS // 2} samples", False)
                    continue
                steps, values = zip(*windows, strict=True)
                growth = 1000 * statistics.linear_regression(steps, values).slope
                shown = (values[0], values[-1], growth)
                self.add(what, shown, f"grows by {bound:g} at most", growth <= bound)

    def record(self, events: Sequence[Event], trained: int, evaluated: int) -> None:
        """All events there, and the run ended well: ranks agreed at each evaluation."""
        for kind, expected in ((Trained, trained), (Evaluated, evaluated)):
            count = sum(isinstance(e, kind) for e in events)
            what = f"events.jsonl: {kind.__name__} events"
            self.add(what, (None, count, None), f"{expected:,}", count == expected)
        ended = next((e for e in reversed(events) if isinstance(e, RunEnded)), None)
        said = "no end" if ended is None else f"{ended.status} {ended.message}".strip()
        self.add("run", (None, said, None), "finished", said == "finished")

    def view(self, rows: int, expected: int, finish_s: float) -> None:
        """As many rows in W&B's file as there were events to show, without a wait at the end."""
        self.add("wandb: rows", (None, rows, None), f"{expected:,}", rows == expected)
        what = "seconds from the last event to the end"
        self.add(what, (None, finish_s, None), f"{FINISH_S:g} at most", finish_s <= FINISH_S)

    def table(self, title: str, notes: Sequence[str]) -> Table:
        """All of it."""
        columns = ("", "after warm-up", "at the end", "growth per 1,000 steps", "bound", "holds")
        return Table(title, columns, self.rows, notes)


def _windows(points: Sequence[tuple[int, float]], last: int) -> list[tuple[float, float]]:
    """(middle step, least value) of each window that has a sample."""
    width = last * (1 - WARM_UP) / WINDOWS
    least: dict[int, float] = {}
    for step, value in points:
        number = min(WINDOWS - 1, int((step - WARM_UP * last) // width)) if width else -1
        if number >= 0:
            least[number] = min(value, least.get(number, value))
    return [(WARM_UP * last + (n + 0.5) * width, value) for n, value in sorted(least.items())]
