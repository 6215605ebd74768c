"""The help of groups, choices and options: what ``kfac-train --help`` prints after its usage.

Every text comes from the dataclass that declares the option. A default is the value that a run
with that choice has: the value of the choice's file in conf/, or else that of the dataclass.
"""

import inspect
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import MISSING

from kfac_bench.config.compose_errors import did_you_mean
from kfac_bench.config.conf_files import CONF_DIR, options_of
from kfac_bench.config.options import options
from kfac_bench.config.registry import TABLES, options_class
from kfac_bench.config.train import LoggerConfig, TrainConfig
from kfac_bench.errors import UsageError

WIDTH = 80
EXPERIMENT = "experiment"


class HelpedOption(NamedTuple):
    """An option with its default and what it declares."""

    name: str
    default: Any
    declared: dict[str, Any]
    owner: type[Any]
    """The dataclass that has the option."""


def describe(words: Sequence[str], config_dir: Path | None = None) -> str:
    """Return the help of each word, or of all groups and options if there is no word.

    Args:
        words: Groups (``kfac``), choices (``optimizer=adam``) and options (``kfac.damping``).
        config_dir: A folder of the user's own with more choices.

    Raises:
        UsageError: A word is none of these.
    """
    if not words:
        return _everything(config_dir)
    return "\n\n".join("\n".join(_of_word(word, config_dir)) for word in words)


def groups() -> list[str]:
    """Return the groups that have choices: the folders of conf/ that a command line may name."""
    return sorted([*TABLES, "kfac", "logger", EXPERIMENT])


def of_choice(group: str, choice: str) -> list[HelpedOption]:
    """Return the options of one choice of a group, with the defaults of its file in conf/."""
    owner = _class_of(group, choice)
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


def every_option() -> dict[str, list[tuple[str, HelpedOption]]]:
    """Return, by name, the choices that have the option; "" stands for no group with choices."""
    found: dict[str, list[tuple[str, HelpedOption]]] = {}
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
        elif group != EXPERIMENT:
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


def _class_of(group: str, choice: str) -> type[Any]:
    if group in TABLES and choice in TABLES[group]:
        return options_class(group, choice)
    if group == "logger":
        return LoggerConfig
    section: type[Any] = get_type_hints(TrainConfig)[group]
    return section


def _everything(config_dir: Path | None) -> str:
    lines = ["groups:"]
    for group in groups():
        lines += _choices(group, config_dir)
    lines.append("options:")
    for found in every_option().values():
        lines += _short(found[0][1])
    return "\n".join(lines)


def _choices(group: str, config_dir: Path | None) -> list[str]:
    # A blank after each bar lets textwrap end a line there.
    choices = "| ".join(options_of(group, config_dir))
    wrapped = textwrap.wrap(f"  {group}={choices}", WIDTH, subsequent_indent=" " * 6)
    return [line.replace("| ", "|") for line in wrapped]


def _of_word(word: str, config_dir: Path | None) -> list[str]:
    group, equals, choice = word.partition("=")
    known = every_option()
    if word in known:
        return _long(known[word])
    if group in (*groups(), "trainer") and not equals:
        return _of_group(group, known, config_dir)
    if group in groups() and equals:
        if choice in options_of(group, config_dir):
            return _of_choice(group, choice)
        meant = did_you_mean(choice, options_of(group, config_dir))
        raise UsageError(f"--help {word}: no such {group}{meant}")
    if group in known:  # kfac.damping=0.1
        return _long(known[group])
    meant = did_you_mean(word, [*groups(), "trainer", *known])
    raise UsageError(f"--help {word}: no such group or option{meant}")


def _of_group(
    group: str, known: dict[str, list[tuple[str, HelpedOption]]], config_dir: Path | None
) -> list[str]:
    lines = [] if group == "trainer" else _choices(group, config_dir)
    if group == EXPERIMENT:
        print_options = "  kfac-train experiment=NAME --cfg job"
        return [*lines, "An experiment sets options of all groups. Print them with:", print_options]
    lines.append("options:")
    for name, found in known.items():
        if name.startswith(f"{group}."):
            lines += _short(found[0][1])
            if group in TABLES and len(found) < len(TABLES[group]):
                lines += _wrapped(f"only of {group}={'|'.join(choice for choice, _ in found)}")
    return lines


def _of_choice(group: str, choice: str) -> list[str]:
    file = CONF_DIR / group / f"{choice}.yaml"
    if group == EXPERIMENT or not file.is_file():  # such as a file of the user's own folder
        return [f"Print the options: kfac-train {group}={choice} --cfg job"]
    about = inspect.getdoc(_class_of(group, choice)) or ""
    lines = _wrapped(f"{group}={choice}: {about.splitlines()[0]}", "")
    return [*lines, *(line for option in of_choice(group, choice) for line in _short(option))]


def _short(option: HelpedOption) -> list[str]:
    allowed = _allowed(option)
    text = f"{option.declared['help']}{f' ({allowed})' if allowed else ''}"
    return [f"  {option.name}={_shown(option.default)}", *_wrapped(text)]


def _long(found: list[tuple[str, HelpedOption]]) -> list[str]:
    """Return the help of one option, which several choices of its group may have."""
    name, default, declared, owner = found[0][1]
    kind = _kind(get_type_hints(owner)[name.rpartition(".")[2]])
    lines = [name, *_wrapped(declared["help"], "  "), "", f"  default: {_shown(default)}"]
    others = {choice: _shown(option.default) for choice, option in found[1:]}
    unlike = {choice: shown for choice, shown in others.items() if shown != _shown(default)}
    group = name.partition(".")[0]
    if found[0][0]:
        lines[-1] += f" with {group}={found[0][0]}"
    for shown in sorted({*unlike.values()}):
        same = "|".join(choice for choice, value in unlike.items() if value == shown)
        lines += _wrapped(f"{shown} with {group}={same}", " " * 11)
    lines.append(f"  type:    {kind}")
    if allowed := _allowed(found[0][1]):
        lines += _wrapped(f"allowed: {allowed}", "  ")
    if group in TABLES and len(found) < len(TABLES[group]):
        lines += _wrapped(f"only of {group}={'|'.join(choice for choice, _ in found)}", "  ")
    if declared["resumable"] or declared["role"].value == "record":
        lines.append("  A run may be continued with another value.")
    return lines


def _wrapped(text: str, indent: str = " " * 6) -> list[str]:
    joined = text.replace("|", "| ")
    wrapped = textwrap.wrap(joined, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return [line.replace("| ", "|") for line in wrapped]


def _allowed(option: HelpedOption) -> str:
    bounds = " and ".join(f"{word} {bound:g}" for word, bound in option.declared["bounds"].items())
    return "|".join(option.declared["choices"]) or bounds


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value == MISSING else str(value)


_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def _kind(hint: Any) -> str:
    """Return a type of an option in words."""
    if hint is type(None):
        return "null"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_kind(part) for part in get_args(hint))
    if get_origin(hint) is list:
        return f"list of values ({_kind(get_args(hint)[0])}), such as [a,b]"
    return _KINDS.get(hint, getattr(hint, "__name__", str(hint)))
