"""The metrics as ``metrics.csv`` in the run directory: one row per event, one column per metric."""

import csv
import io
from collections.abc import Sequence
from typing import TextIO

from kfac_bench.record.events import EVENTS_FILE, REPEATED, Event, Resumed, RunStarted, read
from kfac_bench.record.own_files import write_own
from kfac_bench.record.sinks.metrics import AXES, metrics_of
from kfac_bench.record.sinks.view import FileView, ShownRun


class CsvSink(FileView):
    """The view in ``metrics.csv``.

    The record has each event before this view. So the file is written again from the record when a
    run starts or continues, and when a metric is new.
    """

    name = "metrics.csv"

    def __init__(self, run: ShownRun) -> None:
        super().__init__(run)
        self._names: list[str] = []
        self._file: TextIO | None = None
        self._resumed_at = -1

    def _write(self, event: Event) -> None:
        row = metrics_of(event)
        if isinstance(event, Resumed):
            self._resumed_at = event.step
        replaces = isinstance(event, REPEATED) and event.step == self._resumed_at
        begins = isinstance(event, RunStarted | Resumed)
        if begins or replaces or not row.keys() <= set(self._names):
            self._write_again()
        elif row and self._file is not None:
            self._file.write(self._text([row]))
            self._file.flush()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write_again(self) -> None:
        self._close()
        events = read(self._run.directory / EVENTS_FILE)
        rows = [row for event in events if (row := metrics_of(event))]
        self._names = list(dict.fromkeys([*AXES, *(name for row in rows for name in row)]))
        path = self._run.directory / self.name
        write_own(path, (",".join(self._names) + "\n" + self._text(rows)).encode())
        self._file = path.open("a", newline="")

    def _text(self, rows: Sequence[dict[str, float]]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._names, lineterminator="\n").writerows(rows)
        return text.getvalue()
