"""``kfac-bench wandb upload``: replays event files into W&B.

W&B's server says until when it has points of a run, and only the others are sent. So an interrupted
upload continues, and a complete run is not sent twice. ``--offline`` writes files for
``wandb sync``, unless the run has such files.
"""

import dataclasses
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kfac_bench.config import LoggerConfig
from kfac_bench.config.compose import default_project
from kfac_bench.errors import UsageError
from kfac_bench.record import own_files
from kfac_bench.record.events import (
    EVENTS_FILE,
    MOST_BYTES,
    Event,
    Predicted,
    PredictedItem,
    RunEnded,
    RunStarted,
    parse,
)
from kfac_bench.record.own_files import read_own, refuse_links
from kfac_bench.record.runs import find, last_option, plain
from kfac_bench.record.sinks.view import ShownRun, metrics_of
from kfac_bench.training import predictions

PATIENCE_S = 600.0
"""Time that W&B may take to accept the points."""


@dataclass(frozen=True)
class HistoryPoint:
    """An event that W&B shows: a row of numbers, or pictures and texts without a row."""

    event: Event
    row: Mapping[str, float]

    @property
    def train_s(self) -> float:
        """Training seconds of the event."""
        return self.event.train_s


def upload(
    paths: Iterable[Path], project: str | None, entity: str | None, *, offline: bool
) -> Iterator[tuple[str, bool]]:
    """Send each run at ``paths``; yield lines about each run, and whether W&B has all of it.

    Args:
        paths: Run directories, event files, or folders of runs.
        project: The W&B project; None: that of each run.
        entity: The W&B user or team; None: that of each run.
        offline: Whether to write offline runs instead of sending to the server.

    Raises:
        UsageError: A path has no runs, or there is no server and ``offline`` is not set.
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
            for line in _upload(file.parent, project, entity, offline):
                yield f"{name}: {line}", True
        except UsageError as error:
            yield f"{name}: {error}", False


def read(file: Path) -> tuple[list[Event], str]:
    """Return the events that count, and a message if the last line is damaged and left out."""
    try:
        text = read_own(file, MOST_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    lines = text.rstrip().split("\n")
    try:
        # A process that was killed may have written half of its last line.
        parse(lines[-1] + "\n", file)
    except UsageError:
        return parse("".join(f"{line}\n" for line in lines[:-1]), file), (
            f"line {len(lines)}, the last, is damaged: left out"
        )
    return parse(text, file), ""


def points(events: Sequence[Event], directory: Path) -> list[HistoryPoint]:
    """Return the points of a run, in order. Pictures from other folders are left out."""
    wanted = []
    for event in events:
        if isinstance(event, Predicted):
            kept = _trusted(event, directory)
            wanted += [HistoryPoint(kept, {})] if kept.items else []
        elif row := _numbers(event):
            wanted.append(HistoryPoint(event, row))
    return wanted


def _upload(
    directory: Path, project: str | None, entity: str | None, offline: bool
) -> Iterator[str]:
    from kfac_bench.record.sinks.wandb import local_runs, sent

    if own_files.is_locked(directory):
        raise UsageError("still training; wait until the run has ended")
    refuse_links(directory)  # W&B writes below `directory`
    events, damage = read(directory / EVENTS_FILE)
    if damage:
        yield damage
    started = next((e for e in events if isinstance(e, RunStarted)), None)
    if started is None:
        raise UsageError("no RunStarted event: the run died early, or this is not a run")
    if "computed" in started.config:
        yield "computed, not trained: nothing to send"
        return
    logger = _logger(events, project, entity)
    logger.mode = "offline" if offline else "online"
    run_id, until_s, count, state = logger.id or plain(started.run_id), -math.inf, 0, ""
    if offline and local_runs(directory, run_id, "offline-run"):
        command = f"wandb sync {shlex.quote(str(directory / 'wandb'))}"
        yield (
            f"W&B's offline files are there: nothing to write. Send them with {command}, or remove "
            "them to have them written again"
        )
        return
    if not offline:
        until_s, count, state = sent(run_id, str(logger.project), logger.entity)
    wanted = points(events, directory)
    first = next((i for i, point in enumerate(wanted) if point.train_s >= until_s), len(wanted))
    todo = wanted[first:]
    # Points of one step have the same time. W&B has the first ones of them.
    if todo and todo[0].train_s == until_s:
        todo = todo[count:]
    # W&B calls a run crashed or running if it never heard of the end: then the end is sent again.
    if not todo and state in ("", "finished", "failed"):
        yield f"W&B has the last of {len(wanted)} points: nothing to send"
        return
    line = _send(directory, logger, started, todo, events)
    yield f"{len(todo)} of {len(wanted)} points sent; {line}"


def replay(directory: Path, logger: LoggerConfig) -> str | None:
    """Send all points of a complete run to the W&B run ``logger.id``; return a line about it.

    An agent of a W&B sweep may draw a run that is complete already, and waits for its metrics. None
    if W&B is off, or if the W&B run was sent from this directory before.
    """
    from kfac_bench.record.sinks.wandb import decide_mode, local_runs

    if logger.id is None or local_runs(directory, logger.id):
        return None
    mode = decide_mode(logger.mode).mode
    events, _ = read(directory / EVENTS_FILE)
    started = next((e for e in events if isinstance(e, RunStarted)), None)
    if mode == "disabled" or started is None:
        return None
    todo = points(events, directory)
    line = _send(directory, dataclasses.replace(logger, mode=mode), started, todo, events)
    return f"{len(todo)} points sent again to W&B run {logger.id}; {line}"


def _send(
    directory: Path,
    logger: LoggerConfig,
    started: RunStarted,
    todo: Sequence[HistoryPoint],
    events: Sequence[Event],
) -> str:
    """Send the points to the W&B run, and the end of the run; return the first line of the sink."""
    from kfac_bench.record.sinks.wandb import WandbSink

    lines: list[str] = []
    run = ShownRun(
        directory,
        plain(started.run_id),
        logger,
        dict(started.config) | {"environment": dict(started.environment)},
        plain(started.metric),
        bool(started.higher_is_better),
        lines.append,
    )
    sink = WandbSink(run, PATIENCE_S)
    for point in todo:
        if point.row:
            sink.log(point.row)
        else:
            sink.write(point.event)
    if (ended := next((e for e in reversed(events) if isinstance(e, RunEnded)), None)) is not None:
        sink.write(ended)
    sink.close()
    # The sink goes offline by itself when the server stops answering.
    if sink.failed or sink.mode != logger.mode:
        raise UsageError(f"W&B did not take all points: {plain(lines[-1])}; run the command again")
    return lines[0]


def _numbers(event: Event) -> dict[str, float]:
    """Return the numbers of the event's row, with printable names: files are not trusted."""
    kept = {plain(name): value for name, value in metrics_of(event).items()}
    return kept if kept.keys() - {"step", "train_s", "epoch"} else {}


def _trusted(event: Predicted, directory: Path) -> Predicted:
    """Return the event with only the run's own pictures. Texts and captions stay."""
    items: list[PredictedItem] = []
    for item in event.items:
        if not isinstance(item, dict):
            continue
        file, text = item.get("file"), item.get("text")
        own = predictions.read(directory, file) is not None
        words = plain(text) if isinstance(text, str) else None
        if own or words is not None:
            caption = plain(item.get("caption", ""))
            items.append({"caption": caption, "file": file if own else None, "text": words})
    return dataclasses.replace(event, items=items)


def _logger(events: Sequence[Event], project: str | None, entity: str | None) -> LoggerConfig:
    """Return the place of the run in W&B: as given, else as its last start says."""

    def recorded(name: str) -> str | None:
        value = last_option(events, "logger", name)
        return plain(value) if isinstance(value, str) else None

    tags = last_option(events, "logger", "tags")
    return LoggerConfig(
        project=project or recorded("project") or default_project(),
        entity=entity or recorded("entity"),
        id=recorded("id"),
        group=recorded("group"),
        notes=recorded("notes"),
        tags=[plain(tag) for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else [],
    )
