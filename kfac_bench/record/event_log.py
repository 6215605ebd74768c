"""The event log of a run: what writes ``events.jsonl`` and passes each event to all views.

Each checkpoint holds the length and the hash of the record. So a run that continues, and
:func:`lost_events` for a run that nobody continues, notice events that were lost.
"""

import hashlib
import io
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, TypedDict

from kfac_bench.errors import UsageError, printable
from kfac_bench.record import checkpoint_folder
from kfac_bench.record.events import EVENTS_FILE, MOST_BYTES, Event, Trained
from kfac_bench.record.own_files import open_own, refuse_special, sync_folder

BLOCK_BYTES = 1 << 20


class Sink(Protocol):
    """A view of the event stream."""

    def write(self, event: Event) -> None:
        """Show or store one event."""

    def close(self) -> None:
        """Close files and connections; called once, also after an error."""


class RecordError(Exception):
    """The record of a run cannot be written; the message says why."""


class RecordPosition(TypedDict):
    """The content of an event file at some moment: its length and its SHA-256.

    Each checkpoint holds one, so that a run that continues notices a cut or changed event file.
    """

    bytes: int
    sha256: str


def position_from(found: object) -> RecordPosition | None:
    """Return the position that a checkpoint holds; None for a hand-made checkpoint."""
    if not isinstance(found, dict):
        return None
    size, sha256 = found.get("bytes"), found.get("sha256")
    if type(size) is not int or size < 0 or not isinstance(sha256, str):
        return None
    return {"bytes": size, "sha256": sha256}


def gap_in(file: io.FileIO, size: int, position: RecordPosition) -> str | None:
    """Return why a file of `size` bytes does not begin with the content of `position`, if so."""
    if size < position["bytes"]:
        return f"it has {size:,} bytes, and {position['bytes']:,} were written"
    if _sha256(file, position["bytes"]).hexdigest() != position["sha256"]:
        return f"its first {position['bytes']:,} bytes were changed"
    return None


class JsonlSink:
    """The sink that writes the record: it appends one whole line per event to ``path``.

    Raises:
        UsageError: The file cannot be opened, is no regular file, or is too large.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            descriptor = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._file = io.FileIO(descriptor, "a+")
            size = os.fstat(descriptor).st_size
            if size > MOST_BYTES:
                self._file.close()
                raise UsageError(
                    f"{path}: has {size:,} bytes, and the limit is {MOST_BYTES:,}. Set another "
                    "run_id, or remove the file; the run then continues with a gap in its record"
                )
            _drop_torn_line(self._file)
            self._bytes = self._file.seek(0, os.SEEK_END)
            self._sha256 = _sha256(self._file, self._bytes)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})") from None

    @property
    def position(self) -> RecordPosition:
        """The content so far."""
        return {"bytes": self._bytes, "sha256": self._sha256.hexdigest()}

    def gap(self, position: RecordPosition) -> str | None:
        """Return why the file does not begin with the content of `position`; None if it does."""
        return gap_in(self._file, self._bytes, position)

    def write(self, event: Event) -> None:
        """Append one line.

        Raises:
            RecordError: The line cannot be written, as on a full disk, or the file has reached
                its limit, or another program has changed or removed it. No part of the line
                remains.
        """
        content = line_of(event).encode()
        # The run can still record that it saves and ends.
        most = MOST_BYTES - (BLOCK_BYTES if isinstance(event, Trained) else 0)
        if self._bytes + len(content) > most:
            raise RecordError(
                f"{self._path}: has reached the limit of {MOST_BYTES:,} bytes. Go on with another "
                f"run_id, resume={self._path.parent} and a larger trainer.log_freq"
            )
        self._check_unchanged()
        line = content
        # The file is unbuffered, so a full disk may take only a part of the line.
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._bytes)
            raise RecordError(f"{self._path}: cannot be written ({error.strerror})") from None
        self._bytes += len(content)
        self._sha256.update(content)

    def _check_unchanged(self) -> None:
        ours = os.fstat(self._file.fileno())
        try:
            is_there = os.path.samestat(ours, os.lstat(self._path))
        except OSError:
            is_there = False
        if not is_there or ours.st_size != self._bytes:
            raise RecordError(
                f"{self._path}: another program has changed or removed it during the run. The "
                "same command continues the run and marks the gap"
            )

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._file.fileno())
        sync_folder(self._path.parent)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def line_of(event: Event) -> str:
    """Return the line of an event in an event file."""
    return json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n"


def _drop_torn_line(file: io.FileIO) -> None:
    """Remove an unfinished last line, which a killed process left behind."""
    # The next event would otherwise continue the unfinished line.
    end = start = file.seek(0, os.SEEK_END)
    while start > 0:
        block = min(BLOCK_BYTES, start)
        start = file.seek(start - block)
        if (newline := file.read(block).rfind(b"\n")) >= 0:
            start += newline + 1
            break
    if start < end:
        file.truncate(start)


def _sha256(file: io.FileIO, size: int) -> "hashlib._Hash":
    """Return the hash of the first `size` bytes."""
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0 and (block := file.read(min(BLOCK_BYTES, size))):
        digest.update(block)
        size -= len(block)
    return digest


class EventLog:
    """The sinks of this rank, which all receive each event; only rank 0 has sinks."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self.record = next((sink for sink in sinks if isinstance(sink, JsonlSink)), None)
        """The sink that writes the record; None on ranks other than rank 0."""
        self.problem: str | None = None
        """The reason why an event is missing in the record, or None. If there is a reason, the
        trainer stops the run on all ranks."""

    def emit(self, event: Event) -> None:
        """Write the event to every sink."""
        for sink in self._sinks:
            try:
                sink.write(event)
            except RecordError as error:
                # Ranks send each other this line as UTF-8, and a path need not be UTF-8.
                self.problem = printable(str(error))

    def sync(self) -> None:
        """Wait until the record is on the disk."""
        if self.record is not None:
            self.record.sync()

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def lost_events(directory: Path) -> str | None:
    """Return a text that names the missing events of a run directory and the reason, or None.

    None: no event is missing, or the run has no readable checkpoint and is not checked.
    """
    folder = directory / "checkpoints"
    try:
        refuse_special(folder, folder=True)
        steps = checkpoint_folder.steps(folder)
        if not steps:
            return None
        path = checkpoint_folder.path_of(folder, steps[-1])
        refuse_special(path, folder=True)
        position = position_from(checkpoint_folder.manifest(path).get("record"))
        if position is None:
            return None
        with io.FileIO(open_own(directory / EVENTS_FILE)) as file:
            reason = gap_in(file, os.fstat(file.fileno()).st_size, position)
    except (OSError, ValueError, UsageError):
        return None
    return None if reason is None else f"events before step {steps[-1]} are missing ({reason})"
