"""The record of a run that continues: whether it still holds all events up to the checkpoint.

A cut, changed or deleted event file is noticed here, because each checkpoint holds the length and
the hash of the record. The run continues, says so in one line, and marks the gap with an event.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kfac_bench.record.event_log import EventLog, JsonlSink, position_from
from kfac_bench.record.events import (
    Checkpointed,
    Event,
    RecordGap,
    Resumed,
    RunStarted,
    read,
)
from kfac_bench.record.runs import differences, flatten
from kfac_bench.training.checkpoint import Checkpoint

_PROVENANCE = ("git_commit", "versions", "hardware", "world_size", "device")
_SHOWN = 6
"""How many differences a line shows."""


class RecordCheck:
    """What the record lacks before a run continues from `saved`; only rank 0 makes one."""

    def __init__(self, path: Path, record: JsonlSink, saved: Checkpoint) -> None:
        self._path, self._saved = path, saved
        self._events = read(path)
        position = position_from(saved.shards[0].get("record"))
        self._is_unknown = position is None
        self._reason = None if position is None else record.gap(position)
        if self.lacks_start:
            self._reason = self._reason or "its first event is missing"

    @property
    def lacks_start(self) -> bool:
        """Whether the record has no first event, without which no command can read it."""
        return not any(isinstance(event, RunStarted) for event in self._events)

    def complete(
        self, log: EventLog, train_s: float, about: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        """Emit what the record lacks, and say what the user should know."""
        step = self._saved.step
        if self._reason is not None:
            say(
                f"{self._path}: events before step {step} are missing ({self._reason}). The run "
                "continues, and an event marks the gap"
            )
            log.emit(RecordGap(step, train_s, self._reason))
        elif self._is_unknown:
            say(
                f"{self._saved.path} does not say how long its record was: the record is not "
                "checked for missing events"
            )
        # A process that is killed right after a checkpoint is complete cannot write its event.
        if not any(isinstance(e, Checkpointed) and e.step == step for e in self._events):
            log.emit(Checkpointed(step, train_s, str(self._saved.path), 0.0))
        if line := _changes(self._events, about):
            say(line)


def _changes(events: Sequence[Event], about: Mapping[str, Any]) -> str | None:
    """Return a line about versions and hardware that differ from those of the start before."""
    earlier = [e.environment for e in events if isinstance(e, RunStarted | Resumed)]
    known = next((e for e in reversed(earlier) if e), None)
    if known is None:
        return None
    before, now = (
        flatten({key: environment[key] for key in _PROVENANCE if key in environment})
        for environment in (known, about)
    )
    keys = differences([before, now])
    parts = [f"{k} {before.get(k, 'unknown')} -> {now.get(k, 'unknown')}" for k in keys[:_SHOWN]]
    more = f"; and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"this start differs from the one before: {'; '.join(parts)}{more}" if keys else None
