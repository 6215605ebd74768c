"""Runs as their event files tell them, and settings: runs that differ only in the seed.

What an event file says is not trusted: text is made printable, numbers may be none.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kfac_bench.config.options import RESULT
from kfac_bench.config.roles import declared, result_defaults
from kfac_bench.errors import UsageError
from kfac_bench.record.events import EVENTS_FILE, Event, RunStarted, read

OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "lars": "LARS", "lamb": "LAMB"}


@dataclass(frozen=True)
class Run:
    """One event file: its path (resolved), its first event and all events that count."""

    path: Path
    started: RunStarted
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in the seed; ``options`` is the configuration they share, flat.

    ``task`` and ``optimizer`` are labels, unique as a pair within one :func:`group` call.
    """

    task: str
    optimizer: str
    options: Mapping[str, str]
    runs: tuple[Run, ...]


def load(path: Path) -> Run:
    """Read the run at ``path`` (a run directory or its event file).

    Raises :class:`UsageError` where there is no event file or it does not start a run.
    """
    file = path / EVENTS_FILE if path.is_dir() else path
    events = read(file)
    started = next((e for e in events if isinstance(e, RunStarted)), None)
    if started is None:
        raise UsageError(f"{file}: no RunStarted event: the run died early or this is no run")
    return Run(file.resolve(), started, tuple(events))


def was_computed(run: Run) -> bool:
    """Whether a benchmark computed it (``kfac_bench.benchmark.computed``): nothing was trained."""
    return "computed" in run.started.config


def find(path: Path) -> list[Path]:
    """Event files at ``path``: an event file, a run directory, or all runs below a directory.

    Raises :class:`UsageError` if there is none.
    """
    if path.is_dir() and not (path / EVENTS_FILE).exists():
        found = sorted(path.rglob(EVENTS_FILE))
        if not found:
            raise UsageError(f"{path}: no runs here (looked for {EVENTS_FILE} in all folders)")
        return found
    if not path.exists():
        raise UsageError(f"{path}: no such run; give run directories or a folder of runs")
    return [path / EVENTS_FILE if path.is_dir() else path]


def number(value: object) -> float:
    """``value`` as a float; NaN for what is no number (event files are not trusted)."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def plain(value: object) -> str:
    """``value`` as printable text on one line: no control characters, no lone surrogates."""
    return "".join(c if c.isprintable() else "\ufffd" for c in str(value))


def flatten(options: Mapping[str, Any]) -> dict[str, str]:
    """Nested options as ``{"kfac.damping": "0.003"}``, sorted, values as YAML would say them."""
    flat: dict[str, str] = {}
    todo: list[tuple[str, Any]] = [("", options)]
    while todo:  # a stack, so that absurdly deep nesting is no RecursionError
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
    """Look up ``config[key][key]...``; None where a level is missing."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def seed(run: Run) -> int:
    """Return the run's seed; -1 if its configuration names none."""
    value = run.started.config.get("seed")
    return value if isinstance(value, int) else -1


def target(run: Run) -> float | None:
    """Return the metric value that the run had to reach; None if it had no target."""
    value = number(option(run.started.config, "trainer", "target"))
    return None if math.isnan(value) else value


def clock(run: Run) -> str:
    """Whose seconds the run's times are: ``wall``, or ``cpu``."""
    return plain(option(run.started.config, "trainer", "clock") or "wall")


def group(runs: Iterable[Run]) -> list[Setting]:
    """Group runs into settings, sorted by task, then K-FAC last, then label.

    A run that is given twice (same path) counts once.
    """
    members: dict[tuple[str, tuple[tuple[str, str], ...]], list[Run]] = defaultdict(list)
    for run in {run.path: run for run in runs}.values():
        members[_task_label(run), tuple(sorted(_identity(run).items()))].append(run)
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
    return sorted(settings, key=lambda s: (s.task, _has_kfac(s.runs[0]), s.optimizer))


def differences(options: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of the options that are not the same everywhere (or missing somewhere), sorted."""
    keys = sorted({key for flat in options for key in flat})
    return [key for key in keys if len({flat.get(key) for flat in options}) > 1]


def _has_kfac(run: Run) -> bool:
    return bool(option(run.started.config, "kfac", "enabled"))


def _identity(run: Run) -> dict[str, str]:
    """Return what makes the setting of a run: its RESULT options and its number of ranks.

    Options that the version of the run did not have are at their defaults. The seed makes no
    setting, nor do K-FAC's options where K-FAC is off.
    """
    given = flatten(run.started.config)
    options = {name: text for name, text in given.items() if declared(name, given).role is RESULT}
    options = {name: _text(default) for name, default in result_defaults(given)} | options
    options.pop("seed", None)
    options["world_size"] = plain(option(run.started.environment, "world_size"))
    if _has_kfac(run):
        return options
    return {k: v for k, v in options.items() if not k.startswith("kfac.") or k == "kfac.enabled"}


def _name(run: Run, section: str) -> str:
    return plain(option(run.started.config, section, "name") or f"unknown {section}")


def _task_label(run: Run) -> str:
    label = f"{_name(run, 'data')} {_name(run, 'model')}, {plain(run.started.metric)}"
    goal = target(run)
    if goal is None:
        return label
    return f"{label} {'≥' if run.started.higher_is_better else '≤'} {goal:.12g}"


def _optimizer_label(run: Run) -> str:
    if own := plain(option(run.started.config, "label") or ""):
        return own
    name = _name(run, "optimizer")
    label = OPTIMIZERS.get(name, name)
    return f"K-FAC + {label}" if _has_kfac(run) else label


def _shown(options: Mapping[str, str], keys: Sequence[str]) -> str:
    """``damping 0.03, lr 0.1``: last part of each option's name unless two would be alike."""
    last = Counter(key.rpartition(".")[2] for key in keys)
    short = {key: key.rpartition(".")[2] for key in keys}
    return ", ".join(
        f"{short[key] if last[short[key]] == 1 else key} {options.get(key, 'unset')}"
        for key in keys
    )
