"""The typed events of a run, and the file that holds them.

``events.jsonl`` is the record of a run. Each line is a JSON object, is written at once and never
changes. Tables, figures and reports are computed from event files alone; the console, W&B and
TensorBoard are views of the same stream (:mod:`kfac_bench.record.event_log`). Names of fields end
with the unit (``_s``, ``_bytes``). Times are seconds of the *training clock*, which is paused
during evaluation, checkpoints and logging. An event file may come from somebody else, so
:func:`checked` compares each value with the annotations of its event.
"""

import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from kfac_bench.errors import UsageError
from kfac_bench.record.own_files import read_own

EVENTS_FILE = "events.jsonl"
MOST_BYTES = 1 << 30
"""Limit of an event file, which is read as a whole."""
MOST_WHOLE = 1 << 63
"""Whole numbers are smaller: JSON has larger ones, which no float can hold."""


@dataclass(frozen=True, slots=True)
class Event:
    """Base class: ``step`` counts the updates so far, ``train_s`` is the training clock.

    :class:`Trained`, :class:`Evaluated`, :class:`TargetReached` and the end of a run that did not
    fail have the largest clock of all ranks. Other events have the clock of rank 0, because only
    rank 0 knows of them.
    """

    step: int
    train_s: float


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """First event of a run: its complete configuration and its environment.

    ``run_id`` is the name of the run directory. ``config`` has every option of the run.
    ``environment`` has the versions, the commit, the command and the hardware. ``metric`` is the
    name of the validation metric that a target is about, and ``higher_is_better`` says whether a
    larger value is better. ``payload_bytes`` is the size of K-FAC's messages each time that a stage
    runs, by stage and kind of op. ``data`` is the fingerprint of the data: by split the number of
    examples and a hash.
    """

    run_id: str
    metric: str
    higher_is_better: bool
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    payload_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """The run continues from a checkpoint of ``step``: earlier events after that step are void.

    An evaluation of that step which the run repeats replaces the earlier one.

    ``checkpoint`` is the path of the checkpoint. If the run begins a new phase with it
    (``new_phase``), ``step`` is 0. ``environment`` has the versions and the hardware of this start,
    as in :class:`RunStarted`. ``options`` has the options that this start changed, by their dotted
    names.
    """

    checkpoint: str
    environment: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordGap(Event):
    """Earlier events are missing: the file was cut, changed or deleted before the run continued.

    ``reason`` says in words what is wrong with the file.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class DataChanged(Event):
    """The run continues on other data than those of its checkpoint (``data.changed=accept``).

    ``difference`` says in words how the data differ. ``data`` is the new fingerprint.
    """

    difference: str
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanChosen(Event):
    """K-FAC has chosen options within ``kfac.max_overhead``, and works from the next step on.

    ``options`` has ``max_dim``, ``block_size``, ``factor_update_freq`` and ``update_freq``.
    ``overhead`` is the predicted time of K-FAC per step, as a share of a step without it.
    ``payload_bytes`` is as in :class:`RunStarted`, which has none then.
    """

    options: Mapping[str, int | None]
    overhead: float
    payload_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trained(Event):
    """A training step that is recorded, every ``trainer.log_freq`` steps.

    ``epoch`` counts passes over the training set so far. ``loss`` is the mean over the global batch
    of this step. ``lr`` is the learning rate of this step, of the optimizer's first group.
    ``examples_per_s`` counts the examples of all ranks. It and ``data_wait_share`` cover the time
    since the previous event of this kind; ``data_wait_share`` is the share of the training seconds
    that the slowest rank waited for batches. ``step_mean_s`` is the mean of the training seconds of
    a step since then, on rank 0. ``peak_memory_bytes`` is the maximum over the ranks since their
    processes started: torch's allocations on a GPU, the resident set on a CPU.

    The other fields are about K-FAC and empty without it:

    * ``nu``: the factor by which the limits of the step shrank it (nu of eq. 16).
    * ``cosine``: the cosine between gradient and preconditioned gradient, by layer.
    * ``condition``: by layer, the largest eigenvalue of the damped curvature that K-FAC inverts,
      divided by the smallest one. Only the first event after new decompositions has it.
    * ``stage_s``: seconds of each K-FAC stage in this step.
    * ``stage_mean_s``: means over all ranks and all steps since the previous event.
    * ``damping``: the damping of the next step.
    * ``failed_decompositions``, ``dropped_statistics``: counts over all ranks since the processes
      started. Statistics that are not finite are dropped.
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
    condition: Mapping[str, float] = field(default_factory=dict)
    step_mean_s: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """Exact metrics over the validation set: each example counts once on any number of ranks.

    ``epoch`` counts passes over the training set so far. ``metrics`` has each metric by its name.
    ``left_out`` examples are not counted, because their files cannot be read
    (``data.on_error=skip``).
    """

    epoch: float
    metrics: Mapping[str, float]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class SampleSkipped(Event):
    """A file that cannot be read, so that its examples are left out (``data.on_error=skip``).

    Each such file has one event. ``path`` names the file, ``reason`` says what is wrong with it.
    ``rank`` is a rank that tried to read the file. ``count`` is the number of such files of this
    process so far.
    """

    path: str
    reason: str
    rank: int
    count: int


@dataclass(frozen=True, slots=True)
class TargetReached(Event):
    """The validation metric met the target: ``train_s`` is the time to target.

    ``metric`` is its name, ``value`` what was measured, ``target`` the option ``trainer.target``.
    """

    metric: str
    value: float
    target: float


class PredictedItem(TypedDict):
    """A held-out example with the model's prediction.

    ``caption`` is a line about the example. ``file`` is a PNG file relative to the run directory,
    or None if the example is text or the picture could not be written.
    """

    caption: str
    file: str | None
    text: str | None


@dataclass(frozen=True, slots=True)
class Predicted(Event):
    """Held-out examples with the model's predictions, in the folder ``path``.

    ``items`` has a :class:`PredictedItem` for each example.
    """

    path: str
    items: Sequence[PredictedItem]


@dataclass(frozen=True, slots=True)
class Checkpointed(Event):
    """The checkpoint of ``step`` is complete on disk.

    ``path`` is the folder of the checkpoint. ``write_s`` is how many seconds of wall time the
    training waited for it. ``cpu_s`` is the processor time of the thread on rank 0 that writes the
    checkpoint while the training continues.
    """

    path: str
    write_s: float
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """Last event of a process; ``status``: ``reached``, ``finished``, ``interrupted``, ``failed``.

    ``message`` says why the run ended, if it failed. ``weights_sha256`` is a hash of all parameters
    and buffers, so that equal weights have equal hashes.
    """

    status: str
    message: str = ""
    weights_sha256: str = ""


REPEATED = (Evaluated, TargetReached, Predicted)
"""Events that a run may emit again at the step of its checkpoint, if it was killed afterwards."""

EVENTS: dict[str, type[Event]] = {
    name: cls
    for name, cls in list(globals().items())
    if isinstance(cls, type) and issubclass(cls, Event) and cls is not Event
}
"""The kinds of events, by name."""


def read(path: Path) -> list[Event]:
    """Return the events of a run, without the events that a resume made void.

    An unfinished last line, which a killed process leaves behind, is dropped. Events and fields
    that this version does not know are skipped.

    Args:
        path: The run directory, or its event file.

    Raises:
        UsageError: The file cannot be read, or another line is no event.
    """
    path = path / EVENTS_FILE if path.is_dir() else path
    try:
        text = read_own(path, MOST_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: no event file to read ({error.strerror})") from None
    return parse(text, path)


def parse(text: str, path: Path) -> list[Event]:
    """Return the events in ``text`` as :func:`read` does; error messages name ``path``."""
    lines = text.split("\n")
    found: list[tuple[Event, bool]] = []
    resumed_at = -1
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            event = event_of(json.loads(line))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            if number == len(lines):  # no newline follows: the process was killed here
                break
            raise UsageError(f"{path}:{number}: not an event ({error})") from None
        if event is not None:
            resumed_at = event.step if isinstance(event, Resumed) else resumed_at
            found.append((event, isinstance(event, REPEATED) and event.step == resumed_at))
    return _valid(found)


def _valid(found: Sequence[tuple[Event, bool]]) -> list[Event]:
    """Return the events that no later event makes void.

    Args:
        found: All events, each with whether it repeats events of its kind at its step.
    """
    kept: list[Event] = []
    last_step, repeated_from = math.inf, dict[type[Event], float]()
    # From the end, so that each event is looked at once: a file may have thousands of resumes.
    for event, repeats in reversed(found):
        kind = type(event)
        is_valid = event.step <= last_step and event.step < repeated_from.get(kind, math.inf)
        if is_valid and not (kind is RunEnded and last_step < math.inf):
            kept.append(event)
        # A run that was killed before its first checkpoint starts again from the beginning.
        if kind is RunStarted:
            break
        if kind is Resumed:
            last_step = min(last_step, event.step)
        if repeats:
            repeated_from[kind] = min(event.step, repeated_from.get(kind, math.inf))
    return kept[::-1]


def event_of(fields: Any) -> Event | None:
    """Return the event with these fields; None if this version does not know its kind.

    Raises:
        TypeError, ValueError, KeyError: The fields are no event.
    """
    if not isinstance(fields, dict):
        raise TypeError("a line must be a JSON object")
    cls = EVENTS.get(fields["event"])
    if cls is None:
        return None
    return cls(**checked(cls, fields))


Check = Callable[[Any], Any]


def checked(cls: type, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in ``found`` that are fields of ``cls``, as keyword arguments of ``cls``.

    Numbers become ``int`` or ``float`` as the field asks. An entry of a mapping that has a wrong
    type is left out. A field that must be a list and is none becomes an empty list.

    Raises:
        ValueError: Another field has a wrong type, or a field without a default is missing. The
            message names the field.
    """
    made = {}
    for name, (check, required) in _checks(cls).items():
        if name not in found:
            if required:
                raise ValueError(f"{cls.__name__} lacks {name!r}")
            continue
        try:
            made[name] = check(found[name])
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{cls.__name__}: {name!r} is not of its type") from None
    return made


@cache
def _checks(cls: type) -> Mapping[str, tuple[Check, bool]]:
    hints = typing.get_type_hints(cls)
    return {
        f.name: (_check(hints[f.name]), f.default is MISSING and f.default_factory is MISSING)
        for f in fields(cls)
    }


def _check(hint: Any) -> Check:
    """Return a function that returns its argument as the type ``hint``, or raises."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin in (types.UnionType, typing.Union):  # X | None
        (some,) = (_check(x) for x in arguments if x is not type(None))
        return lambda value: None if value is None else some(value)
    if origin is Mapping:
        of = _check(arguments[1])
        return lambda value: _those_that_are(of, value)
    if origin is Sequence:  # the readers of the list check its items
        return lambda value: value if isinstance(value, list) else []
    if hint is int:
        return _whole
    if hint is float:
        return lambda value: float(_exactly(value, int, float))
    if hint is str:
        return lambda value: str(_exactly(value, str, int, float, type(None)))
    return lambda value: _exactly(value, hint)


def _whole(value: Any) -> int:
    number = int(_exactly(value, int, float))
    if abs(number) >= MOST_WHOLE:
        raise OverflowError
    return number


def _those_that_are(of: Check, value: Any) -> dict[str, Any]:
    """Return the entries of a mapping whose values have the right type."""
    found = {}
    for key, each in _exactly(value, dict).items():
        with suppress(TypeError, ValueError, OverflowError):
            found[key] = of(each)
    return found


def _exactly(value: Any, *kinds: type) -> Any:
    """Return the value if its type is one of ``kinds``; raise ``TypeError`` otherwise."""
    # isinstance() would take True for an int.
    if type(value) not in kinds:
        raise TypeError
    return value
