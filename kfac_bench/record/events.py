"""One stream of typed events per run; everything that is shown, plotted or tabled reads it.

``events.jsonl`` is the record of a run: one JSON object a line, flushed at once, appended
only. Console, W&B and TensorBoard are views (:class:`Sink`). Field names carry the unit
(``_s``, ``_bytes``). Times are seconds of the *training clock*, which stands still during
evaluation, checkpoints and logging.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict

from kfac_bench.errors import UsageError
from kfac_bench.record.event_fields import checked

EVENTS_FILE = "events.jsonl"


@dataclass(frozen=True, slots=True)
class Event:
    """Base: every event knows the step (updates done so far) and the training clock."""

    step: int
    train_s: float


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """First event of a run: what is run (the resolved configuration), where, with what.

    ``metric`` names the validation figure that a target is about. ``payload_bytes`` is what K-FAC's
    messages carry, by stage and kind of op, each time that the stage runs.
    """

    run_id: str
    metric: str
    higher_is_better: bool
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    payload_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """The run went on from a checkpoint of ``step``: events after that step are void."""

    checkpoint: str


@dataclass(frozen=True, slots=True)
class Trained(Event):
    """The last training step: global mean loss, throughput since the previous event.

    ``nu`` is the KL clip factor (eq. 16), ``cosine`` the angle between the gradient and the
    preconditioned gradient by layer, ``stage_s`` seconds of the step's K-FAC stages,
    ``stage_mean_s`` the same as means of all steps since the previous event and of all ranks,
    ``damping`` that of the next step; ``failed_decompositions`` and ``dropped_statistics``
    (not finite, left out) count over all ranks since the process started. All empty without
    K-FAC. ``data_wait_share`` is what the slowest rank spent waiting for batches, of the training
    seconds since the previous event. ``peak_memory_bytes`` is the most that a rank has held since
    its process started: on a GPU what torch allocated, on a CPU the resident set.
    """

    epoch: float
    loss: float
    lr: float
    examples_per_s: float
    nu: float | None = None
    cosine: Mapping[str, float] = field(default_factory=dict)
    stage_s: Mapping[str, float] = field(default_factory=dict)
    damping: float | None = None
    failed_decompositions: int | None = None
    dropped_statistics: int | None = None
    data_wait_share: float | None = None
    stage_mean_s: Mapping[str, float] = field(default_factory=dict)
    peak_memory_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """Exact metrics over the whole validation set (each example once, on any rank count).

    But for ``left_out`` examples whose files cannot be read (``data.on_error=skip``).
    """

    epoch: float
    metrics: Mapping[str, float]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class SampleSkipped(Event):
    """A file that cannot be read, and why: its examples are left out (``data.on_error=skip``).

    ``rank`` is one that met it. The ``count``-th such file of the process; each has one event.
    """

    path: str
    reason: str
    rank: int
    count: int


@dataclass(frozen=True, slots=True)
class TargetReached(Event):
    """The validation metric met the target: ``train_s`` is the time to target."""

    metric: str
    value: float
    target: float


class PredictedItem(TypedDict):
    """One example: a line about it, a PNG file relative to the run directory, text of any length.

    ``file`` is None where the example is text, or where the picture could not be written.
    """

    caption: str
    file: str | None
    text: str | None


@dataclass(frozen=True, slots=True)
class Predicted(Event):
    """Held-out examples with what the model makes of them, to be looked at; ``path``: where."""

    path: str
    items: Sequence[PredictedItem]


@dataclass(frozen=True, slots=True)
class Checkpointed(Event):
    """The checkpoint of ``step`` is complete on disk; ``write_s`` is what the training waited.

    It is written beside the training: ``cpu_s`` processor seconds of a thread on rank 0.
    """

    path: str
    write_s: float
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """Last event of a process: ``reached``, ``finished``, ``interrupted`` or ``failed``.

    ``weights_sha256`` is of all parameters and buffers: equal runs have equal ones.
    """

    status: str
    message: str = ""
    weights_sha256: str = ""


EVENTS: dict[str, type[Event]] = {
    cls.__name__: cls
    for cls in (
        RunStarted,
        Resumed,
        Trained,
        Evaluated,
        SampleSkipped,
        TargetReached,
        Predicted,
        Checkpointed,
        RunEnded,
    )
}


class Sink(Protocol):
    """Receives events; a view of the stream, never its owner."""

    def write(self, event: Event) -> None:
        """Show or store one event."""

    def close(self) -> None:
        """Release what is open; called once, also after an error."""


class RecordError(Exception):
    """The record of a run cannot be written, and why."""


class JsonlSink:
    """The record: appends to ``path``, one whole line per event.

    Raises :class:`UsageError` if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            if path.exists():
                _drop_torn_line(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})") from None

    def write(self, event: Event) -> None:
        """Append one line, or nothing of it. Raises :class:`RecordError`, as on a full disk."""
        line = json.dumps({"event": type(event).__name__, **asdict(event)}).encode() + b"\n"
        before = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(before)
            raise RecordError(f"{self._path}: cannot be written ({error.strerror})") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _drop_torn_line(path: Path) -> None:
    """Cut off what a killed process did not finish, or the next event would be glued to it."""
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


class EventLog:
    """Fans events out to the sinks of this rank (none on ranks above 0)."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self.problem: str | None = None
        """Why the record lacks an event; whoever runs the run is to stop it, on all ranks."""

    def emit(self, event: Event) -> None:
        """Write the event to every sink."""
        for sink in self._sinks:
            try:
                sink.write(event)
            except RecordError as error:
                self.problem = str(error)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def read(path: Path) -> list[Event]:
    """Events of a run (its directory or its event file), without those a resume made void.

    A torn last line (the process was killed while writing) is dropped; unknown events and
    fields of later versions are skipped. Raises :class:`UsageError` on anything else.
    """
    path = path / EVENTS_FILE if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: no event file to read ({error.strerror})") from None
    return parse(text, path)


def parse(text: str, path: Path) -> list[Event]:
    """:func:`read` of what an event file holds; errors name ``path``."""
    lines = text.split("\n")
    events: list[Event] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            event = _parse(json.loads(line))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            if number == len(lines):  # no newline after it: torn by a kill
                break
            raise UsageError(f"{path}:{number}: not an event ({error})") from None
        if isinstance(event, RunStarted):  # anew: killed before its first checkpoint
            events = []
        if isinstance(event, Resumed):
            resumed_at = event.step
            events = [e for e in events if e.step <= resumed_at and not isinstance(e, RunEnded)]
        if event is not None:
            events.append(event)
    return events


def _parse(fields: Any) -> Event | None:
    if not isinstance(fields, dict):
        raise TypeError("a line must be a JSON object")
    cls = EVENTS.get(fields["event"])
    if cls is None:
        return None
    return cls(**checked(cls, fields))


CLOCKS = ("wall", "cpu")
"""What a training clock reads: the time of day, or what processors worked for this process."""


class Clock:
    """Training time: a stopwatch that is paused for all that is not training."""

    def __init__(self, kind: str) -> None:
        self._elapsed_s = 0.0
        self._since: float | None = None
        self._kind = kind

    def set(self, elapsed_s: float) -> None:
        """Stand still at that reading."""
        self._elapsed_s, self._since = elapsed_s, None

    def _now(self) -> float:
        return time.process_time() if self._kind == "cpu" else time.perf_counter()

    def start(self) -> None:
        """Let it run."""
        self._since = self._now()

    def stop(self) -> None:
        """Let it stand still."""
        self._elapsed_s, self._since = self.train_s(), None

    def train_s(self) -> float:
        """Seconds counted so far."""
        running = 0.0 if self._since is None else self._now() - self._since
        return self._elapsed_s + running

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still inside the block (and stay so if it stood still before)."""
        was_running = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if was_running:
                self.start()
