"""Runs as their event files describe them, and settings: runs that differ only in the seed.

A table has one row per setting. The contents of event files are not trusted: text is made
printable, and a value that should be a number may be something else.
"""

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kfac_bench.config import problem_file
from kfac_bench.config.option_table import declared, original_results
from kfac_bench.config.options import RESULT
from kfac_bench.core.planning.plan import EIGEN_ADAM
from kfac_bench.errors import UsageError, printable
from kfac_bench.record.events import (
    EVENTS_FILE,
    Event,
    Resumed,
    RunEnded,
    RunStarted,
    Trained,
    read,
)

OPTIMIZERS = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "lars": "LARS",
    "lamb": "LAMB",
    "muon": "Muon",
    "soap": "SOAP",
    EIGEN_ADAM: "EigenAdam",
}


@dataclass(frozen=True)
class Run:
    """A run: the resolved path of its event file, its first event, and all valid events."""

    path: Path
    started: RunStarted
    events: tuple[Event, ...]

    @property
    def ended(self) -> RunEnded | None:
        """The event with which the run ended; None if the run has not ended."""
        return next((e for e in reversed(self.events) if isinstance(e, RunEnded)), None)

    @property
    def trained(self) -> list[Trained]:
        """The events of training steps."""
        return [e for e in self.events if isinstance(e, Trained)]

    @property
    def pace(self) -> tuple[float, float]:
        """Seconds of a step and of an epoch, from the first Trained event to the last; or NaN.

        The steps before the first event are left out, because they use each kernel for the first
        time.
        """
        trained = self.trained
        if len(trained) < 2 or trained[-1].step <= trained[0].step:
            return math.nan, math.nan
        first, last = trained[0], trained[-1]
        seconds = number(last.train_s) - number(first.train_s)
        epochs = number(last.epoch) - number(first.epoch)
        steps = number(last.step) - number(first.step)
        return seconds / steps, seconds / epochs if epochs > 0 else math.nan


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in the seed.

    ``options`` holds the RESULT options that the runs share, by their dotted names. ``task`` and
    ``optimizer`` are labels; no two settings of one :func:`group` call have the same pair.
    """

    task: str
    optimizer: str
    options: Mapping[str, str]
    runs: tuple[Run, ...]


def load(path: Path) -> Run:
    """Read the run at ``path``, a run directory or its event file.

    Raises:
        UsageError: There is no event file, or it has no ``RunStarted`` event.
    """
    file = path / EVENTS_FILE if path.is_dir() else path
    events = read(file)
    started = next((e for e in events if isinstance(e, RunStarted)), None)
    if started is None:
        raise UsageError(f"{file}: no RunStarted event: the run died early or this is no run")
    return Run(file.resolve(), started, tuple(events))


def was_computed(run: Run) -> bool:
    """Return whether ``kfac_bench.benchmark.computed`` wrote the run, so that nothing trained."""
    return "computed" in run.started.config


def refuse_missing(paths: Iterable[Path]) -> None:
    """Raise :class:`UsageError` for a path that does not exist. No file is read."""
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path}: no such run; give run directories or a folder of runs")


def find(path: Path) -> list[Path]:
    """Return the event files at ``path``: an event file, a run directory or a folder of runs.

    Raises:
        UsageError: There is no event file, or a folder cannot be read.
    """
    if path.is_dir() and not (path / EVENTS_FILE).exists():
        found = [folder / EVENTS_FILE for folder in directories(path, _refuse_folder)]
        if not found:
            raise UsageError(f"{path}: no runs here (looked for {EVENTS_FILE} in all folders)")
        return found
    refuse_missing([path])
    return [path / EVENTS_FILE if path.is_dir() else path]


def directories(root: Path, on_error: Callable[[OSError], object]) -> Iterator[Path]:
    """Yield the run directories in ``root`` and in all folders below, in the order of names.

    ``on_error`` gets the error of a folder that cannot be read.
    """
    for folder, names, files in os.walk(root, onerror=on_error):
        names.sort()
        if EVENTS_FILE in files:
            names.clear()
            yield Path(folder)


def _refuse_folder(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # somebody else has removed it meanwhile
        raise UsageError(f"{error.filename}: cannot be read ({error.strerror}). Name other folders")


def number(value: object) -> float:
    """Return ``value`` as a float; NaN if it is no number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def plain(value: object) -> str:
    """Return ``value`` as printable text on one line."""
    return printable(str(value))


def flatten(options: Mapping[str, Any]) -> dict[str, str]:
    """Return nested options by their sorted dotted names, such as ``{"kfac.damping": "0.003"}``."""
    flat: dict[str, str] = {}
    todo: list[tuple[str, Any]] = [("", options)]
    # A stack instead of recursion, because a damaged file may nest thousands of levels.
    while todo:
        prefix, value = todo.pop()
        if isinstance(value, Mapping) and value:
            todo += [(f"{prefix}.{key}" if prefix else str(key), value[key]) for key in value]
        elif prefix:
            flat[plain(prefix)] = _text(value)
    return dict(sorted(flat.items()))


def _text(value: Any) -> str:
    """Return an option's value as YAML would write it, printable."""
    return plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def option(config: Mapping[str, Any], *keys: str) -> Any:
    """Return ``config[key][key]...``, or None if a level is missing."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def last_option(events: Iterable[Event], *keys: str) -> Any:
    """Return an option as the last start of a run had it, or None if no start names it."""
    first = last = None
    for event in events:
        if isinstance(event, RunStarted):
            first = last = option(event.config, *keys)
        elif isinstance(event, Resumed):
            # A later start names only the options that differ from those of the first one.
            last = event.options.get(".".join(keys), first)
    return last


def seed(run: Run) -> int:
    """Return the run's seed; -1 if its configuration names none."""
    value = run.started.config.get("seed")
    return value if isinstance(value, int) else -1


def target(run: Run) -> float | None:
    """Return the metric value that the run had to reach; None if it had no target."""
    value = number(option(run.started.config, "trainer", "target"))
    return None if math.isnan(value) else value


def clock(run: Run) -> str:
    """Return the kind of the run's training clock, ``wall`` or ``cpu``."""
    return plain(option(run.started.config, "trainer", "clock") or "wall")


def group(runs: Iterable[Run]) -> list[Setting]:
    """Return the settings of the runs, sorted by task, then first-order before K-FAC, then label.

    Two runs with the same path count as one. Settings that would have the same labels get the
    options in which they differ, such as ``SGD (lr 0.1)``.
    """
    members: dict[tuple[str, tuple[tuple[str, str], ...]], list[Run]] = defaultdict(list)
    for run in {run.path: run for run in runs}.values():
        members[_task_label(run), tuple(sorted(_identity(run).items()))].append(run)
    # Labels are short, so several settings may get the same one: their differences are added.
    same_label: dict[tuple[str, str], list[Setting]] = defaultdict(list)
    for (task, options), repeats in members.items():
        ordered = tuple(sorted(repeats, key=lambda run: (seed(run), str(run.path))))
        label = _optimizer_label(ordered[0])
        same_label[task, label].append(Setting(task, label, dict(options), ordered))
    settings = []
    for alike in same_label.values():
        keys = differences([setting.options for setting in alike])
        for setting in alike:
            suffix = f" ({_shown(setting.options, keys)})" if keys else ""
            settings.append(replace(setting, optimizer=setting.optimizer + suffix))
    settings.sort(key=lambda s: (s.task, has_kfac(s.runs[0]), s.optimizer, str(s.runs[0].path)))
    # The label that a user has given to a run may equal that of other settings.
    unique: dict[tuple[str, str], Setting] = {}
    for setting in settings:
        label, count = setting.optimizer, 1
        while (setting.task, label) in unique:
            count += 1
            label = f"{setting.optimizer} [{count}]"
        unique[setting.task, label] = replace(setting, optimizer=label)
    return list(unique.values())


def differences(options: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the sorted names of the options whose values differ or that some do not have."""
    keys = sorted({key for flat in options for key in flat})
    return [key for key in keys if len({flat.get(key) for flat in options}) > 1]


def has_kfac(run: Run) -> bool:
    """Return whether the run trained with K-FAC."""
    return bool(option(run.started.config, "kfac", "enabled"))


def _identity(run: Run) -> dict[str, str]:
    """Return the identity of a run's setting: its RESULT options and its number of ranks.

    Options that the version of the run did not have are at their original values. The seed makes
    no setting, nor do K-FAC's options where K-FAC is off.
    """
    given = flatten(run.started.config)
    options = {name: text for name, text in given.items() if declared(name, given).role is RESULT}
    # Without the original values, each new option of a later version would split a setting in two.
    options = {name: _text(value) for name, value in original_results(given)} | options
    options.pop("seed", None)
    options["world_size"] = plain(option(run.started.environment, "world_size"))
    if has_kfac(run):
        return options
    return {k: v for k, v in options.items() if not k.startswith("kfac.") or k == "kfac.enabled"}


def _name(run: Run, section: str) -> str:
    return plain(option(run.started.config, section, "name") or f"unknown {section}")


def _task_label(run: Run) -> str:
    trained = f"{_name(run, 'data')} {_name(run, 'model')}"
    if isinstance(file := option(run.started.config, "data", "file"), str):
        arguments = plain(option(run.started.config, "data", "arguments") or "")
        trained = problem_file.title(file, arguments)
    label = f"{trained}, {plain(run.started.metric)}"
    goal = target(run)
    if goal is None:
        return label
    return f"{label} {'≥' if run.started.higher_is_better else '≤'} {goal:.12g}"


def _optimizer_label(run: Run) -> str:
    if own := plain(option(run.started.config, "label") or ""):
        return own
    name = _name(run, "optimizer")
    label = OPTIMIZERS.get(name, name)
    return f"K-FAC + {label}" if has_kfac(run) and name != EIGEN_ADAM else label


def _shown(options: Mapping[str, str], keys: Sequence[str]) -> str:
    """Return a text such as ``damping 0.03, lr 0.1``.

    A name is the last part of the option's dotted name, unless two options share that part.
    """
    last = Counter(key.rpartition(".")[2] for key in keys)
    short = {key: key.rpartition(".")[2] for key in keys}
    return ", ".join(
        f"{short[key] if last[short[key]] == 1 else key} {options.get(key, 'unset')}"
        for key in keys
    )
