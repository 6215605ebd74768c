"""The verdict: what grew in the run, and whether all events reached the file and W&B."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kfac_bench.record.events import Evaluated, Event, RunEnded, Trained
from kfac_bench.report.tables import Table, Value
from tests.reliability.soak.processes import TICKS_PER_S, Sample

Point = tuple[int, float]
"""A step and a value."""

WARM_UP = 0.25
"""Share of the steps that does not count, because caches fill and buffers find their sizes."""
WINDOWS = 8
"""Number of windows of the other steps."""
BOUNDS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "rank": {"resident MB": (4.0, 32.0), "open files": (0.5, 2.0), "threads": (0.5, 2.0)},
    # Processes that a rank started, such as W&B's: their files and threads depend on their work.
    "helper": {"resident MB": (8.0, 64.0), "open files": (2.0, 8.0), "threads": (2.0, 8.0)},
    # Events and W&B's file have a line for each event, so they may grow.
    "disk": {"checkpoints MB": (0.5, 2.0), "records MB": (1.0, math.inf)},
}
"""Largest growth over 1,000 steps, and over the whole run after the warm-up."""
MOST_SLOWER = 1.25
"""Largest quotient of the CPU seconds of a step in the second half and in the first half."""
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

    def samples(self, samples: Iterable[Sample]) -> None:
        """Add a row for each metric of each subject: the slope after the warm-up."""
        points: dict[str, dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
        for each in samples:
            points[each.subject][each.metric].append((each.step, each.value))
        steps = {subject: next(iter(own.values()))[-1][0] for subject, own in points.items()}
        last = max(steps.values(), default=0)
        for subject, own in sorted(points.items()):
            kind = "disk" if subject == "disk" else "helper" if "'" in subject else "rank"
            # A helper that ended early, such as git, cannot grow.
            if kind == "helper" and steps[subject] < (1 + WARM_UP) / 2 * last:
                continue
            for metric, bound in BOUNDS[kind].items():
                self._level(f"{subject}: {metric}", own[metric], last, bound)
            if kind == "rank":
                self._equally_fast(f"{subject}: CPU s for 1,000 steps", own["CPU s"], last)

    def _level(
        self, what: str, points: Sequence[Point], last: int, bound: tuple[float, float]
    ) -> None:
        """Add a row for a metric that must not grow."""
        windows = _windows(points, last)
        if len(windows) < WINDOWS // 2:
            self._too_few(what)
            return
        # A window's least sample counts, because a checkpoint in flight needs memory for a time.
        steps, values = zip(
            *((middle, min(v for _, v in own)) for middle, own in windows), strict=True
        )
        growth = 1000 * statistics.linear_regression(steps, values).slope
        most = min(bound[0], bound[1] / ((1 - WARM_UP) * last / 1000))
        shown = (values[0], values[-1], growth)
        self.add(what, shown, f"grows by {most:.3g} at most", growth <= most)

    def _equally_fast(self, what: str, points: Sequence[Point], last: int) -> None:
        """Add a row for the CPU time of a step, which must not grow.

        CPU time depends less on other work of the machine than the time of day.
        """
        rates = [
            1000 * (own[-1][1] - own[0][1]) / (own[-1][0] - own[0][0])
            for _, own in _windows(points, last)
            if own[-1][0] > own[0][0]
        ]
        if len(rates) < WINDOWS // 2:
            self._too_few(what)
            return
        half = len(rates) // 2
        first, second = statistics.median(rates[:half]), statistics.median(rates[half:])
        # The system counts in ticks; the start and the end of a window may each miss one.
        resolution = 2000 / TICKS_PER_S / ((1 - WARM_UP) * last / WINDOWS)
        holds = second <= MOST_SLOWER * first + resolution
        self.add(what, (first, second, None), f"{MOST_SLOWER:g} times the first at most", holds)

    def _too_few(self, what: str) -> None:
        self.add(what, (None, None, None), f"{WINDOWS // 2} samples", False)

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


def _windows(points: Sequence[Point], last: int) -> list[tuple[float, list[Point]]]:
    """Return the middle step and the points of each window that has a point."""
    width = last * (1 - WARM_UP) / WINDOWS
    windows: dict[int, list[Point]] = defaultdict(list)
    for step, value in points:
        number = min(WINDOWS - 1, int((step - WARM_UP * last) // width)) if width else -1
        if number >= 0:
            windows[number].append((step, value))
    return [(WARM_UP * last + (n + 0.5) * width, own) for n, own in sorted(windows.items())]
