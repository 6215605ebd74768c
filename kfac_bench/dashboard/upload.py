"""``kfac-bench wandb upload``: event files to W&B, point by point, none of them twice.

What W&B has is asked first, of its server or of the offline runs in the run's directory, and held
against the event file by what a row measures and when. So an upload that was broken off goes on,
one that was complete sends nothing, and of a run whose W&B process was killed only the lost points
go, into the same W&B run.
"""

from __future__ import annotations

import fcntl
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kfac_bench.errors import UsageError
from kfac_bench.record.events import (
    EVENTS_FILE,
    Event,
    Predicted,
    PredictedItem,
    RunEnded,
    RunStarted,
    parse,
)
from kfac_bench.record.runs import find, number, option, plain
from kfac_bench.record.sinks.metrics import metrics_of
from kfac_bench.training import predictions

PATIENCE_S = 600.0
"""For W&B to take what it is given."""
_KINDS = ("train/", "eval/", "target/", "checkpoint/", "data/", "predict")
"""First letters that tell what kind of event a row was."""


@dataclass(frozen=True)
class HistoryPoint:
    """An event that W&B shows: its row of numbers, or pictures and texts."""

    event: Event
    row: Mapping[str, float]

    @property
    def identity(self) -> Hashable:
        """As :func:`identity` of W&B's row."""
        return identity(self.row)


def upload(
    paths: Iterable[Path], project: str | None, entity: str | None, *, offline: bool
) -> Iterator[tuple[str, bool]]:
    """Send each run at ``paths``; a line on each and whether W&B has all of it.

    ``project`` and ``entity`` instead of each run's own. Raises :class:`UsageError` for a path
    without runs, and without a server unless ``offline``.
    """
    from kfac_bench.record.sinks.wandb import decide_mode

    files = [file for path in paths for file in find(path)]
    if not offline:
        mode, reason = decide_mode()
        if mode != "online":
            raise UsageError(
                f"wandb upload needs W&B's server: {reason}; --offline writes runs for wandb sync"
            )
    for file in files:
        name = plain(file.parent)
        try:
            for said in _upload(file.parent, project, entity, offline):
                yield f"{name}: {said}", True
        except UsageError as error:
            yield f"{name}: {error}", False


def read(file: Path) -> tuple[list[Event], str]:
    """Events that count, and a line on the last one if it is damaged: it is left out then."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{file}: no event file to read ({error.strerror})") from None
    lines = text.rstrip().split("\n")
    try:
        parse(lines[-1] + "\n", file)
    except UsageError:
        return parse("".join(f"{line}\n" for line in lines[:-1]), file), (
            f"line {len(lines)}, the last, is damaged: left out"
        )
    return parse(text, file), ""


def points(events: Sequence[Event], directory: Path) -> list[HistoryPoint]:
    """What W&B is to have, in order; pictures that are not the run's own are left out."""
    found = []
    for event in events:
        if isinstance(event, Predicted):
            kept = _trusted(event, directory)
            shown = {"predictions": 0.0} if kept.items else {}
            row = {"step": float(event.step), "train_s": event.train_s, **shown}
            found += [HistoryPoint(kept, row)] if shown else []
        elif row := _numbers(event):
            found.append(HistoryPoint(event, row))
    return found


def missing(
    wanted: Sequence[HistoryPoint], rows: Iterable[Mapping[str, Any]]
) -> list[HistoryPoint]:
    """Points that are not among W&B's ``rows``."""
    there = Counter(identity(row) for row in rows)
    lacking = []
    for point in wanted:
        if there[point.identity] > 0:
            there[point.identity] -= 1
        else:
            lacking.append(point)
    return lacking


def identity(row: Mapping[str, Any]) -> Hashable:
    """What a row measures and when; ``_step`` and time of W&B's own are no part of it."""
    kinds = frozenset(kind for kind in _KINDS if any(str(key).startswith(kind) for key in row))
    return kinds, *(number(row.get(key, 0)) for key in ("step", "train_s", "data/skipped_files"))


def _upload(
    directory: Path, project: str | None, entity: str | None, offline: bool
) -> Iterator[str]:
    from kfac_bench.record.sinks import wandb_history
    from kfac_bench.record.sinks.wandb import WandbSink

    if _is_running(directory):
        raise UsageError("is being trained: wait until it has ended")
    events, damage = read(directory / EVENTS_FILE)
    if damage:
        yield damage
    started = next((e for e in events if isinstance(e, RunStarted)), None)
    if started is None or not isinstance(started.config, Mapping):
        raise UsageError("no RunStarted event: the run died early or this is no run")
    if "computed" in started.config:
        yield "computed, not trained: nothing to send"
        return
    project = project or _text(started, "project") or "kfac_bench"
    entity = entity or _text(started, "entity")
    wanted = points(events, directory)
    run_id, state = plain(started.run_id), ""
    if offline:
        there: Iterable[Mapping[str, Any]] = wandb_history.offline(directory)
    else:
        there, state = wandb_history.online(run_id, project, entity) or ([], "")
    todo = missing(wanted, there)
    ended = next((e for e in reversed(events) if isinstance(e, RunEnded)), None)
    if not todo and state in ("", "finished", "failed"):
        yield f"all of its {len(wanted)} points are there: nothing to do"
        return
    said: list[str] = []
    sink = WandbSink(
        directory,
        run_id,
        project,
        entity,
        dict(started.config) | {"environment": dict(started.environment)},
        "offline" if offline else "online",
        metric=plain(started.metric),
        higher_is_better=bool(started.higher_is_better),
        say=said.append,
        patience_s=PATIENCE_S,
    )
    for point in todo:
        if isinstance(point.event, Predicted):
            sink.write(point.event)
        else:
            sink.log(point.row)
    if ended is not None:
        sink.write(ended)
    sink.close()
    if sink.failed or sink.mode != ("offline" if offline else "online"):
        raise UsageError(f"W&B has not got all of it: {plain(said[-1])}; run the command again")
    yield f"{len(todo)} of {len(wanted)} points sent; {said[0]}"


def _numbers(event: Event) -> dict[str, float]:
    """The event's row without what is no number: event files are not trusted."""
    try:
        row = metrics_of(event)
    except Exception:  # of fields that are no mappings
        return {}
    kept = {plain(n): number(v) for n, v in row.items() if isinstance(v, int | float)}
    return kept if kept.keys() - {"step", "train_s", "epoch"} else {}


def _trusted(event: Predicted, directory: Path) -> Predicted:
    """With the run's own pictures alone; the others' captions stay, as texts."""
    items: list[PredictedItem] = []
    for item in event.items if isinstance(event.items, list) else []:
        if not isinstance(item, dict):
            continue
        file, text = item.get("file"), item.get("text")
        own = predictions.read(directory, file) is not None
        words = plain(text) if isinstance(text, str) else None
        if own or words is not None:
            caption = plain(item.get("caption", ""))
            items.append({"caption": caption, "file": file if own else None, "text": words})
    return replace(event, items=items)


def _text(started: RunStarted, name: str) -> str | None:
    value = option(started.config, "logger", name)
    return plain(value) if isinstance(value, str) else None


def _is_running(directory: Path) -> bool:
    """Whether a process holds the run's lock."""
    try:
        with (directory / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
