"""A table of all options: what each declares, and its default with each choice of a group.

The table comes from the dataclasses that declare the options. A default is the value that a run
with that choice has: the value of the choice's file in conf/, or else that of the dataclass. The
help, the completion, the site and the errors about unknown options read this table.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, get_type_hints

import yaml
from omegaconf import MISSING

from kfac_bench.config.conf_files import CONF_DIR
from kfac_bench.config.options import allows_one_value, options, range_in_words
from kfac_bench.config.registry import TABLES, options_class
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
        values = yaml.safe_load(file.read_text()) or {}
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
    entries = yaml.safe_load((CONF_DIR / "train.yaml").read_text())["defaults"]
    return {k: v for entry in entries if isinstance(entry, dict) for k, v in entry.items()}


def _of_class(prefix: str, owner: type[Any]) -> Iterator[HelpedOption]:
    for name, value, declared in options(owner(), prefix):
        yield HelpedOption(name, value, declared, owner)


def class_of(group: str, choice: str) -> type[Any]:
    """Return the dataclass with the options of a choice."""
    if group in TABLES and choice in TABLES[group]:
        return options_class(group, choice)
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
