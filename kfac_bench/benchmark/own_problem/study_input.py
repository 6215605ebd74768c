"""The input of ``kfac-bench try``: the checked words, and the settings that each optimizer tries.

The settings are those of conf/benchmark/try.yaml, in the order in which they run. They may also
come from an earlier study (``--from RUN``). Then they are read from the event files of its runs,
which are not trusted.
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfac_bench.benchmark import schema
from kfac_bench.benchmark.schema import Tuning
from kfac_bench.benchmark.trials import overrides_of, rank, trial_settings
from kfac_bench.config import problem_file
from kfac_bench.config.problem_file import ProblemFile
from kfac_bench.errors import UsageError
from kfac_bench.record.runs import Run, find, load, option, plain

REFERENCE = "adamw"
"""The optimizer that all others are compared with."""
FISHER = "kfac.fisher"

Settings = Mapping[str, Any]


@functools.cache
def tuning() -> Tuning:
    """Return the tuning section of conf/benchmark/try.yaml."""
    found = schema.load("try").tuning
    assert found is not None
    return found


def choose(names: str | None) -> list[str]:
    """Return the optimizers that a comma-separated text names; None stands for all.

    Raises:
        UsageError: A name is unknown, or AdamW or every other optimizer is missing.
    """
    known = list(tuning().space)
    if names is None:
        return known
    chosen = [name for name in names.split(",") if name]
    for name in chosen:
        if name not in known:
            raise UsageError(f"--optimizers {names}: {name!r}: choose among {','.join(known)}")
    if REFERENCE not in chosen or len(set(chosen)) < 2:
        raise UsageError(
            f"--optimizers {names}: name {REFERENCE}, which the others are compared with, and at "
            "least one other"
        )
    return [name for name in known if name in chosen]


def candidates(
    optimizer: str, *, has_likelihood: bool, start: Settings | None = None
) -> list[Settings]:
    """Return the settings of an optimizer in the order in which they are tried.

    Args:
        optimizer: A name of conf/benchmark/try.yaml.
        has_likelihood: Whether the problem names a likelihood; without it labels cannot be drawn.
        start: Settings of an earlier study, which come first.
    """
    found = tuning()
    fixed = {k: v for k, v in found.space[optimizer].items() if not isinstance(v, dict)}
    starts = [fixed | each for each in found.starts.get(optimizer, [])]
    if start:
        starts.insert(0, {**starts[0], **start})
    every = [*starts, *trial_settings(found, optimizer)]
    kept = [{k: v for k, v in each.items() if k != FISHER or has_likelihood} for each in every]
    return [each for i, each in enumerate(kept) if each not in kept[:i]]


def chosen_options(optimizers: Iterable[str]) -> set[str]:
    """Return the options that the study sets, so that the user's words must not set them."""
    found = tuning()
    return {
        key
        for name in optimizers
        for each in (found.space[name], *found.starts.get(name, []))
        for key in each
    }


def starts_from(folder: Path) -> dict[str, Settings]:
    """Return the settings that an earlier study ended with, by optimizer.

    Runs on fresh seeds decide; without them the best trial of the optimizer does.

    Raises:
        UsageError: The folder holds no study.
    """
    if not (folder / "tuning").is_dir():
        raise UsageError(
            f"--from {folder}: no study of kfac-bench try; give its folder, such as runs/try-NAME"
        )
    trials = _by_label(folder / "tuning")
    finals = _by_label(folder / "final") if (folder / "final").is_dir() else {}
    found: dict[str, Settings] = {}
    labels = tuning().labels
    for optimizer in tuning().space:
        runs = finals.get(labels[optimizer]) or trials.get(labels[optimizer])
        if runs:
            best = min(runs, key=rank)
            # A setting that has never had a finite metric is no start.
            if math.isfinite(min(rank(best))):
                found[optimizer] = _settings_of(best, chosen_options([optimizer]))
    if not found:
        raise UsageError(f"--from {folder}: no run of this study can be read")
    return found


def _by_label(folder: Path) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    try:
        files: Sequence[Path] = find(folder)
    except UsageError:  # no run has begun
        return {}
    for file in files:
        try:
            run = load(file)
        except UsageError:  # a run that died before its first event has no settings
            continue
        found.setdefault(plain(option(run.started.config, "label")), []).append(run)
    return found


def _settings_of(run: Run, keys: Iterable[str]) -> Settings:
    """Return the values of the options ``keys`` that are safe as words of a command."""
    found: dict[str, Any] = {}
    for key in sorted(keys):
        group, _, name = key.partition(".")
        section = option(run.started.config, group)
        if name and isinstance(section, Mapping) and name in section and _is_safe(section[name]):
            found[key] = section[name]
    return found


def _is_safe(value: Any) -> bool:
    # A text from a file could otherwise hold an interpolation, such as ${oc.env:HOME}.
    if isinstance(value, str):
        return re.fullmatch(r"\w{1,40}", value) is not None
    return (
        value is None
        or isinstance(value, bool | int)
        or (isinstance(value, float) and math.isfinite(value))
    )


@dataclass(frozen=True)
class Asked:
    """The input of ``kfac-bench try``, which the command has checked."""

    file: str
    """Path of the problem's file."""
    words: Sequence[str]
    """The user's overrides of kfac-train."""
    minutes: float
    ranks: int
    seeds: int
    """Number of planned fresh seeds."""
    target: float | None
    candidates: Mapping[str, Sequence[Settings]]
    """The settings of each optimizer, in the order in which they are tried."""

    @property
    def chosen(self) -> ProblemFile:
        """The problem, with the arguments that the words set."""
        found = problem_file.chosen([f"{problem_file.WORD}{self.file}", *self.words])
        assert found is not None
        return found

    @property
    def title(self) -> str:
        """The name of the problem."""
        return problem_file.title(self.file, self.chosen.arguments)


def base_words(asked: Asked, settings: Settings) -> list[str]:
    """Return the overrides that all runs of a setting share."""
    # Hydra takes one choice of a group only.
    is_logged = any(word.startswith("logger=") for word in asked.words)
    return [
        f"problem={asked.file}",
        *([] if is_logged else ["logger=none"]),
        "trainer.predictions=0",
        *asked.words,
        *overrides_of(settings),
    ]
