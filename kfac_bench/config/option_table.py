"""A table of all options: what each declares, and its default with each choice of a group.

The table comes from the dataclasses that declare the options. A default is the value that a run
with that choice has: the value of the choice's file in conf/, or else that of the dataclass. The
help, the completion, the site and the errors about unknown options read this table.

The second part looks up what an option declares by a name that comes from a file. Files of older
and newer versions name options that this version does not have, and lack options that it has. An
unknown option counts as a RESULT option, because one row too many in a table is better than two
settings in one row. The last part suggests names in place of unknown ones.
"""

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import yaml
from omegaconf import MISSING

from kfac_bench.config.conf_files import CONF_DIR
from kfac_bench.config.groups import TABLES
from kfac_bench.config.options import (
    RECORD,
    RESULT,
    Role,
    allows_one_value,
    options,
    range_in_words,
)
from kfac_bench.config.train import LoggerConfig, TrainConfig

EXPERIMENT, RECIPE = "experiment", "recipe"
SET_ALL = (EXPERIMENT, RECIPE)
"""Groups whose choices set options of all groups, and that have no options of their own."""


class HelpedOption(NamedTuple):
    """An option with its default and what it declares."""

    name: str
    default: Any
    declared: dict[str, Any]
    owner: type[Any]
    """The dataclass that has the option."""


Owners = list[tuple[str, HelpedOption]]
"""The choices that have an option, each with what the option is there."""


def groups() -> list[str]:
    """Return the groups that have choices: the folders of conf/ that a command line may name."""
    return sorted([*TABLES, "kfac", "logger", *SET_ALL])


def of_choice(group: str, choice: str) -> list[HelpedOption]:
    """Return the options of one choice of a group, with the defaults of its file in conf/."""
    owner = class_of(group, choice)
    file = CONF_DIR / group / f"{choice}.yaml"
    values: dict[str, Any] = {}
    if file.is_file():
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    # The file of a model that also chooses its task and data has the model's options one deeper.
    values = values.get(group, values)
    return [
        HelpedOption(name, values.get(name.partition(".")[2], value), declared, owner)
        for name, value, declared in options(owner(), f"{group}.")
    ]


def every_option() -> dict[str, Owners]:
    """Return, by name, the choices that have the option; "" stands for no group with choices."""
    found: dict[str, Owners] = {}
    for choice, option in _of_all_choices():
        found.setdefault(option.name, []).append((choice, option))
    return found


def _of_all_choices() -> Iterator[tuple[str, HelpedOption]]:
    default = default_choices()
    for group in groups():
        if group in TABLES:
            # The default choice comes first: its values are what a command without words has.
            for choice in sorted(TABLES[group], key=lambda name: name != default[group]):
                yield from ((choice, option) for option in of_choice(group, choice))
        elif group not in SET_ALL:
            yield from (("", option) for option in of_choice(group, default[group]))
    hints = get_type_hints(TrainConfig)
    yield from (("", option) for option in _of_class("trainer.", hints["trainer"]))
    for name, value, declared in options(TrainConfig()):
        if "." not in name and declared:
            yield "", HelpedOption(name, value, declared, TrainConfig)


def default_choices() -> dict[str, str]:
    """Return the choice of each group in conf/train.yaml."""
    entries = yaml.safe_load((CONF_DIR / "train.yaml").read_text(encoding="utf-8"))["defaults"]
    return {k: v for entry in entries if isinstance(entry, dict) for k, v in entry.items()}


def _of_class(prefix: str, owner: type[Any]) -> Iterator[HelpedOption]:
    for name, value, declared in options(owner(), prefix):
        yield HelpedOption(name, value, declared, owner)


def class_of(group: str, choice: str) -> type[Any]:
    """Return the dataclass with the options of a choice."""
    if group in TABLES and choice in TABLES[group]:
        return TABLES[group][choice]
    if group == "logger":
        return LoggerConfig
    section: type[Any] = get_type_hints(TrainConfig)[group]
    return section


def meanings(found: Owners) -> list[Owners]:
    """Divide the choices that have an option by what the option means there.

    ``optimizer.nesterov``, for example, is something else with Adam than with SGD. Choices with
    which the option has no meaning are left out.
    """
    divided: dict[tuple[str, str], Owners] = {}
    for choice, option in found:
        if allows_one_value(option.declared):
            continue
        meaning = option.declared["help"], allowed(option)
        divided.setdefault(meaning, []).append((choice, option))
    return list(divided.values())


def defaults(found: Owners) -> list[tuple[str, list[str]]]:
    """Return each default of an option, with the choices that have it; the usual choice first."""
    by_value: dict[str, list[str]] = {}
    for choice, option in found:
        by_value.setdefault(shown(option.default), []).append(choice)
    return list(by_value.items())


def allowed(option: HelpedOption) -> str:
    """Return the choices or the range of an option; nothing if any value is allowed."""
    return "|".join(option.declared["choices"]) or range_in_words(option.declared["bounds"])


def shown(value: Any) -> str:
    """Return a value as YAML and the command line write it; nothing if there is no value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value == MISSING else str(value)


# ---- options by names that come from files


@dataclass(frozen=True)
class DeclaredOption:
    """The declaration of an option; ``original`` is MISSING if the option has no default."""

    role: Role = RESULT
    resumable: bool = False
    original: Any = MISSING


def declared(name: str, given: Mapping[str, Any]) -> DeclaredOption:
    """Return the declaration of the option called ``name``.

    Args:
        name: The dotted name of the option, such as ``optimizer.beta2``.
        given: Options by their dotted names. ``optimizer.name`` among them says whose ``beta2``.
    """
    group = name.partition(".")[0]
    # All options of the loggers are records, also logger.name of older versions.
    unknown = DeclaredOption(RECORD if group == "logger" else RESULT)
    return _options_of(group, str(given.get(f"{group}.name"))).get(name, unknown)


def original_results(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and original value of each RESULT option of the groups that ``given`` names."""
    for group in {name.partition(".")[0] for name in given}:
        for name, option in _options_of(group, str(given.get(f"{group}.name"))).items():
            if option.role is RESULT and option.original != MISSING:
                yield name, option.original


@cache
def _options_of(group: str, choice: str) -> Mapping[str, DeclaredOption]:
    """Return the options of a choice by name; of an unknown choice, those all choices have."""
    schema: Any = get_type_hints(TrainConfig).get(group)
    if is_dataclass(schema):
        if choice in TABLES.get(group, {}):
            schema = TABLES[group][choice]
        every = options(schema(), f"{group}.")
    else:  # an option that belongs to no group, such as the seed
        every = options(TrainConfig())
    return {
        name: DeclaredOption(meta["role"], meta["resumable"], meta["original"])
        for name, _, meta in every
        if "role" in meta
    }


# ---- what the user may have meant by an unknown option or choice


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the most similar known words, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=5, cutoff=0.6)
    if not close:
        return ""

    def likeness(other: str) -> tuple[float, int]:
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(other, word, strict=False))
        return difflib.SequenceMatcher(None, other, word).ratio(), len([*same])

    best = max(map(likeness, close))
    return f"; did you mean {' or '.join(w for w in sorted(close) if likeness(w) == best)}?"


def no_such_option(name: str, known: Iterable[str] = ()) -> str:
    """Return the line about an option that the configuration does not have.

    Args:
        name: The dotted name, as in ``optimizer.beta1``.
        known: Names without the group that are allowed in its place.
    """
    group, _, own_name = name.rpartition(".")
    every = every_option()
    if name in every:
        # Another optimizer has this option, for example.
        choices = "|".join(choice for choice, _ in every[name])
        return f"{name}: the chosen {group} has no such option; only {group}={choices} has it"
    siblings = [f"{group}.{key}" if group else key for key in known]
    by_own_name: dict[str, list[str]] = {}
    for each in every:
        by_own_name.setdefault(each.rpartition(".")[2], []).append(each)
    # A word without its group, such as lr=0.1, or an option of another group.
    same = by_own_name.get(own_name, [])
    if 0 < len(same) <= 3:
        return f"{name}: no such option; did you mean {' or '.join(same)}?"
    meant = did_you_mean(name, siblings) or did_you_mean(name, every)
    if not meant and (close := difflib.get_close_matches(own_name, by_own_name, n=1)):
        meant = f"; did you mean {by_own_name[close[0]][0]}?"
    return f"{name}: no such option{meant}"


def no_such_choice(group: str, word: str, choices: Sequence[str]) -> str:
    """Return the line about an unknown choice of a group, such as ``model=resnet51``."""
    name = word.rpartition("/")[2]  # timm/resnet18
    # The library that the user names first; torchvision, which is always installed, before timm.
    libraries = sorted(TABLES["model"], reverse=True) if group == "model" else []
    for choice in sorted(libraries, key=lambda library: f"{library}/" not in word):
        if option := TABLES["model"][choice].option_for(name):
            return f"model={word}: write model={choice} {option}"
    return f"{group}={word}: no such {group}{_instead(group, word, choices)}"


def what_to_choose(word: str, choices: Sequence[str]) -> str:
    """Say what to choose from: every name, or only similar names where a line has no room."""
    # The name of an experiment without its folder.
    in_folders = [choice for choice in choices if word == choice.rpartition("/")[2]]
    if in_folders:
        return f"; did you mean {in_folders[0]}?"
    if len(choices) <= 40:
        known = ", ".join(choices) or "none: the folder is empty"
        meant = did_you_mean(word, choices)
        return f"{meant} Choose one of {known}" if meant else f"; choose one of {known}"
    like = [name for name in choices if word in name] or difflib.get_close_matches(word, choices, 5)
    meant = f"; did you mean {', '.join(like[:5])}?" if like else ""
    return f"{meant or ';'} kfac-train --help lists all {len(choices)}"


def _instead(group: str, word: str, choices: Sequence[str]) -> str:
    if group == "data" and "/" in word:
        return f"; a file or folder is data.root={word}. Choose one of {', '.join(choices)}"
    for name, found in every_option().items():
        is_of_group = name.startswith(f"{group}.") and not name.endswith(".name")
        if is_of_group and any(word in option.declared["choices"] for _, option in found):
            # kfac=inverse names a method, and the group kfac has strategies.
            return f"; did you mean {name}={word}? {group}= chooses one of {', '.join(choices)}"
    return what_to_choose(word, choices)
