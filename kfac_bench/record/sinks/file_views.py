"""The views in files of the run directory: ``metrics.csv`` and TensorBoard's ``tensorboard/``."""

import csv
import io
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import numpy as np
from PIL import Image

from kfac_bench.errors import MissingPackageError
from kfac_bench.record.events import (
    EVENTS_FILE,
    REPEATED,
    Event,
    Predicted,
    PredictedItem,
    Resumed,
    RunStarted,
    read,
)
from kfac_bench.record.own_files import write_own
from kfac_bench.record.sinks.panels import SECTIONS
from kfac_bench.record.sinks.view import AXES, FileView, ShownRun, metrics_of


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
        header = {name: name for name in self._names}
        write_own(path, self._text([header, *rows]).encode())
        self._file = path.open("a", newline="")

    def _text(self, rows: Sequence[Mapping[str, float | str]]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._names, lineterminator="\n").writerows(rows)
        return text.getvalue()


class TensorboardSink(FileView):
    """The view in TensorBoard: options as hyperparameters, each metric as a scalar over ``step``.

    The wall time of a scalar is the start of the run plus the training seconds. So the axis
    "Relative" of TensorBoard shows training time, without evaluations and pauses.
    """

    name = "TensorBoard"

    def __init__(self, run: ShownRun) -> None:
        super().__init__(run)
        try:
            from torch.utils.tensorboard import SummaryWriter
            from torch.utils.tensorboard.summary import hparams
        except ImportError:
            raise MissingPackageError("tensorboard", "logger=tensorboard") from None
        self._new_writer: Callable[..., Any] = SummaryWriter
        self._hparams: Callable[..., Any] = hparams
        self._directory = run.directory / "tensorboard"
        self._writer: Any = None
        self._began_s = 0.0
        self._purge_step: int | None = None
        """Readers drop scalars from this step on that were written before; None: they drop none."""

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, event: Event) -> None:
        # A start or a resume hides the scalars that it made void.
        row = metrics_of(event)
        resumed = isinstance(event, Resumed)
        if isinstance(event, RunStarted):
            # A run that was killed before its first checkpoint starts again from the beginning.
            self._purge_step = 0
        if not row and not isinstance(event, Predicted | Resumed):
            return
        if self._writer is None or resumed:
            self._open(event.step + 1 if resumed else self._purge_step)
        began_s = self._began_s
        for name in row.keys() - {"step"}:
            self._writer.add_scalar(name, row[name], event.step, walltime=began_s + event.train_s)
        if isinstance(event, Predicted):
            for number, item in enumerate(event.items):
                self._add_prediction(f"{number:02d}", item, event.step)

    def _open(self, purge_step: int | None) -> None:
        """Begin a file, with the options of the run at its top."""
        self._close()
        # The name of a file has its time. The first file began with the run.
        files = self._directory.glob("events.out.tfevents.*")
        times = [int(file.name.split(".")[3]) for file in files]
        self._began_s = float(min(times, default=int(time.time())))
        self._writer = self._new_writer(str(self._directory), purge_step=purge_step)
        metric = {f"eval/{self._run.metric}": 0.0}  # TensorBoard reads the value from the scalars
        for summary in self._hparams(_hyperparameters(self._run.config), metric):
            self._writer.file_writer.add_summary(summary)
        self._writer.add_custom_scalars(_layout())

    def _add_prediction(self, number: str, item: PredictedItem, step: int) -> None:
        if item["file"] is not None:
            with Image.open(self._run.directory / item["file"]) as image:
                pixels = np.array(image)
            self._writer.add_image(f"predictions/{number}", pixels, step, dataformats="HWC")
        lines = [item["caption"], *(item["text"] or "").splitlines()]
        # Markdown shows indented lines as they are.
        text = "\n".join(f"    {line}" for line in lines)
        self._writer.add_text(f"captions/{number}", text, step)


def _layout() -> dict[str, dict[str, list[Any]]]:
    """Return the panels for TensorBoard's page "Custom Scalars", by section and title."""
    return {
        section.name: {
            # A name is a regular expression there. The page draws lines alone, over steps.
            chart.title: ["Multiline", [chart.pattern or f"^{key}$" for key in chart.keys or ("",)]]
            for chart in section.charts
            if chart.kind in ("line", "area") and chart.x == "step" and not chart.by
        }
        for section in SECTIONS
    }


def _hyperparameters(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the options by their dotted names: numbers as numbers, all others as text."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= {} if name == "environment" else _hyperparameters(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value if isinstance(value, bool | int | float) else str(value)
    return found
