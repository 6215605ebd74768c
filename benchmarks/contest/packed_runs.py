"""Finished runs in few bytes, so that a repository can keep them: one ``.jsonl.gz`` file for many.

Each line is a :class:`PackedRun` as JSON: what the run was for, and the events that results are
computed from. :func:`pack` leaves out events and options that no table needs, and everything that
names the machine's folders. A file is data only: it is never unpickled, its size is limited, and
the type of each value is checked.

:mod:`benchmarks.contest.result_store` decides which runs are kept, and where.
"""

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from kfac_bench.config.option_table import declared
from kfac_bench.config.options import RESULT
from kfac_bench.errors import UsageError, one_line
from kfac_bench.record.events import (
    Evaluated,
    Event,
    RecordGap,
    RunEnded,
    RunStarted,
    TargetReached,
    Trained,
    checked,
    event_of,
)
from kfac_bench.record.runs import flatten, option
from kfac_bench.whole_files import whole_file

MOST_FILE_BYTES = 8_000_000
MOST_BYTES = 100_000_000
"""Limits of a file's size, packed and unpacked: a small file can unpack to many gigabytes."""
CURVE = 12
"""Evaluations that a packed run keeps."""
KEPT_ENVIRONMENT = ("git_commit", "versions", "world_size", "device")
KEPT_HARDWARE = ("cpu", "cpu_count", "gpus", "threads")


@dataclass(frozen=True)
class PackedRun:
    """A finished run, and what it was for. ``failure`` says why its process failed, if it did."""

    name: str
    """Name of the run directory."""
    kind: str
    """``trial`` or ``final`` of a tuning, ``table`` or ``baseline``."""
    task: str
    optimizer: str
    seed: int
    sitting: str
    """Name of the sitting; see :mod:`benchmarks.contest.sitting`."""
    date: str
    settings: Mapping[str, Any]
    """The trial's point of the tuning space; {} for other kinds."""
    events: Sequence[Event]
    failure: str = ""

    @property
    def key(self) -> tuple[str, str, int, str]:
        """The identity of the result. A later run with the same key replaces this run."""
        if self.kind == "baseline":
            own = self.name
        elif self.kind == "table":
            own = ""  # a study has one winner, also if another setting wins later
        else:
            own = json.dumps(self.settings, sort_keys=True)
        return self.kind, self.optimizer, self.seed, own


def pack(events: Sequence[Event], *, whole_curve: bool = False) -> tuple[Event, ...]:
    """Return the events that results need, with a thinned curve and without private details.

    Times of the target and of the end, steps and the target's value stay exact. ``whole_curve``
    keeps every evaluation, and the two training events that give the time of a step.
    """
    kept: list[Event] = []
    evaluations: list[Evaluated] = []
    started: RunStarted | None = None
    for event in events:
        if isinstance(event, RunStarted):
            started = event
            kept.append(_without_details(event))
        elif isinstance(event, RecordGap):
            kept.append(replace(event, reason=event.reason[:200]))
        elif isinstance(event, Evaluated):
            evaluations.append(event)
    if whole_curve:
        trained = [event for event in events if isinstance(event, Trained)]
        ends = trained[:1] + trained[1:][-1:]
        kept += [replace(event, cosine={}, stage_s={}, stage_mean_s={}) for event in ends]
    if started is not None:
        kept += _thinned(evaluations, started, len(evaluations) if whole_curve else CURVE)
    # A later start may have had an easier target, so not always the first event counts.
    kept += [event for event in events if isinstance(event, TargetReached)]
    ended = [event for event in events if isinstance(event, RunEnded)]
    kept += [replace(e, message=e.message[:200], weights_sha256="") for e in ended[-1:]]
    return tuple(kept)


def _without_details(started: RunStarted) -> RunStarted:
    """Keep RESULT options that are not at their original values, names, and the machine's kind."""
    given = flatten(started.config)

    def kept(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        for key, value in tree.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping):
                if inner := kept(value, f"{name}."):
                    chosen[key] = inner
                continue
            own = declared(name, given)
            is_result = own.role is RESULT and value != own.original
            if is_result or key in ("name", "enabled") or name in ("seed", "label"):
                chosen[key] = value
        return chosen

    config = kept(started.config)
    if not option(config, "kfac", "enabled"):
        config["kfac"] = {"enabled": False}
    config.pop("logger", None)
    environment = {k: v for k, v in started.environment.items() if k in KEPT_ENVIRONMENT}
    hardware = started.environment.get("hardware")
    if isinstance(hardware, Mapping):
        environment["hardware"] = {k: v for k, v in hardware.items() if k in KEPT_HARDWARE}
    return replace(started, config=config, environment=environment, payload_bytes={})


def _thinned(evaluations: Sequence[Evaluated], started: RunStarted, count: int) -> list[Event]:
    """Return the first, the best and the last two evaluations, and others at equal distances.

    The time to the target is interpolated between the last two.
    """
    values = [e.metrics.get(started.metric, math.nan) for e in evaluations]
    known = [i for i, value in enumerate(values) if not math.isnan(value)]
    sign = -1 if started.higher_is_better else 1
    chosen = {min(known, key=lambda i: sign * values[i])} if known else set()
    last = len(evaluations) - 1
    chosen |= {round(i * last / max(1, count - 1)) for i in range(count)} if evaluations else set()
    chosen |= {last - 1} & {*range(len(evaluations))}
    return [
        replace(
            evaluations[i],
            train_s=_rounded(evaluations[i].train_s),
            epoch=_rounded(evaluations[i].epoch),
            metrics={started.metric: _rounded(values[i])},
        )
        for i in sorted(chosen)
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def write(path: Path, runs: Iterable[PackedRun]) -> None:
    """Write the file as a whole. The same runs give the same bytes, in whatever order they are.

    Raises:
        UsageError: The file cannot be written.
    """
    ordered = sorted(runs, key=lambda run: run.key)
    lines = [json.dumps(_fields(run), separators=(",", ":")) + "\n" for run in ordered]
    packed = gzip.compress("".join(lines).encode(), mtime=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            temporary.write_bytes(packed)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None


def _fields(run: PackedRun) -> dict[str, Any]:
    own = {name: value for name, value in vars(run).items() if name != "events"}
    return own | {"events": [event_fields(event) for event in run.events]}


def read(path: Path) -> list[PackedRun]:
    """Return the runs of a file, in the order of their dates: a later run replaces an earlier one.

    Raises:
        UsageError: The file is damaged, too large, or cannot be read.
    """
    runs = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        try:
            runs.append(_run_of(json.loads(line)))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            reason = one_line(error)[:200]
            raise UsageError(f"{path}:{number}: not a packed run ({reason}). {_ADVICE}") from None
    return sorted(runs, key=lambda run: run.date)


_ADVICE = "Take the file from the history of the repository, or delete it to run its trials again"


def _text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is no regular file. {_ADVICE}")
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise UsageError(f"{path}: larger than {MOST_FILE_BYTES / 1e6:g} MB. {_ADVICE}")
        with gzip.open(path) as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UsageError(f"{path}: unpacks to more than {MOST_BYTES / 1e6:g} MB. {_ADVICE}")
        return content.decode()
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = one_line(error)[:200]
        raise UsageError(f"{path}: damaged ({reason}). {_ADVICE}") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None


def _run_of(found: Any) -> PackedRun:
    if not isinstance(found, dict):
        raise TypeError("a line must be a JSON object")
    if not isinstance(found.get("events"), list):
        raise TypeError("events must be a list")
    known = checked(PackedRun, found)
    # The name becomes a folder below the folder of runs, so it must not lead elsewhere.
    if not re.fullmatch(r"[\w.=+-]{1,200}", known["name"]) or set(known["name"]) <= {"."}:
        raise ValueError("name must be letters, digits and . _ - = +")
    events = [event for each in known["events"] if (event := event_of(each)) is not None]
    return PackedRun(**(known | {"events": tuple(events)}))


def event_fields(event: Event) -> dict[str, Any]:
    """Return the fields of an event's line in an event file, without those at their defaults."""
    values = asdict(event)
    for each in fields(event):
        default = each.default_factory() if callable(each.default_factory) else each.default
        if values[each.name] == default:
            del values[each.name]
    return {"event": type(event).__name__, **values}
