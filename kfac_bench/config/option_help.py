"""The help of groups, choices and options: what ``kfac-train --help`` prints after its usage.

Names, meanings and defaults come from :mod:`kfac_bench.config.option_table`.
"""

import inspect
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from kfac_bench.config.conf_files import CONF_DIR, PROFILES, first_sentence, folders, options_of
from kfac_bench.config.groups import TABLES
from kfac_bench.config.option_table import (
    EXPERIMENT,
    RECIPE,
    SET_ALL,
    HelpedOption,
    Owners,
    allowed,
    class_of,
    defaults,
    did_you_mean,
    every_option,
    groups,
    meanings,
    no_such_option,
    of_choice,
    shown,
)
from kfac_bench.config.options import allows_one_value
from kfac_bench.errors import UsageError

WIDTH = 80
HARDWARE = "hardware"
"""The folder of conf/ whose files describe machines. They are no choices of kfac-train."""
WORDS = {
    "problem": "problem=FILE: a Python file with your own model and data. problem.NAME=VALUE sets "
    "an argument of the file.",
    "from": "from=FILE: the options of an earlier run, read from its config.yaml. Other options of "
    "the command replace them.",
    "profile": f"profile={'|'.join(PROFILES)}: the size of an experiment of the papers, "
    "as in experiment=kaisa_unet_lgg profile=smoke.",
}
"""The words of the command line that are neither groups nor options."""
OPTIONS_HEAD = "options (other choices may have other defaults: --help OPTION shows them):"


def describe(words: Sequence[str], config_dir: Path | None = None) -> str:
    """Return the help of each word, or of all groups and options if there is no word.

    Args:
        words: Groups (``kfac``), choices (``optimizer=adam``), options (``kfac.damping``), words
            such as ``from``, and ``hardware`` for the machines of conf/hardware.
        config_dir: A folder of the user's own with more choices.

    Raises:
        UsageError: A word is none of these.
    """
    if not words:
        return _everything(config_dir)
    return "\n\n".join("\n".join(_of_word(word, config_dir)) for word in words)


def _everything(config_dir: Path | None) -> str:
    known = every_option()
    lines = ["groups:"]
    for group in groups():
        if group == EXPERIMENT:
            lines.append("  experiment=NAME     (--help experiment lists the names)")
        else:
            lines += _choices(group, config_dir)
    lines.append(OPTIONS_HEAD)
    for found in known.values():
        lines += _listed(found)
    return "\n".join(lines)


def _listed(found: Owners) -> list[str]:
    """Return an option as lists show it: once for each meaning that choices give it."""
    lines = []
    for same in meanings(found):
        lines += _short(same[0][1])
        if limit := _only_of(same):
            lines += _wrapped(limit)
    return lines


def _only_of(found: Owners) -> str:
    """Say which choices of the group have the option; nothing if all of them have it."""
    group = found[0][1].name.partition(".")[0]
    if group not in TABLES or len(found) == len(TABLES[group]):
        return ""
    return f"only with {group}={'|'.join(choice for choice, _ in found)}"


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
    if group == HARDWARE:
        return _files_of(
            HARDWARE,
            "--hardware NAME: the machine that a simulation is about. kfac-plan simulate and "
            "kfac-bench scaling take this option. NAME may also be the path of your own YAML file.",
            config_dir,
            "--hardware ",
        )
    if group in WORDS:
        return _wrapped(WORDS[group], "")
    own_group = () if "." in word else [*groups(), "trainer", HARDWARE, *WORDS]
    raise UsageError(f"--help {no_such_option(word, own_group)}")


def _of_group(group: str, known: dict[str, Owners], config_dir: Path | None) -> list[str]:
    if group == RECIPE:
        return _files_of(
            RECIPE,
            "recipe=NAME: the settings of a paper. kfac-train and kfac-plan choose the recipe of "
            "data and model by themselves. Other options of the command replace those of the "
            "recipe. recipe=none turns it off.",
            config_dir,
            f"{RECIPE}=",
        )
    lines = [] if group == "trainer" else _choices(group, config_dir)
    if group == EXPERIMENT:
        print_options = "  kfac-train experiment=NAME --cfg job"
        return [*lines, "An experiment sets options of all groups. Print them with:", print_options]
    lines.append(OPTIONS_HEAD)
    for name, found in known.items():
        if name.startswith(f"{group}."):
            lines += _listed(found)
    return lines


def _of_choice(group: str, choice: str) -> list[str]:
    file = CONF_DIR / group / f"{choice}.yaml"
    if group in SET_ALL or not file.is_file():  # such as a file of the user's own folder
        return [f"Print the options: kfac-train {group}={choice} --cfg job"]
    about = inspect.getdoc(class_of(group, choice)) or ""
    lines = _wrapped(f"{group}={choice}: {about.splitlines()[0]}", "")
    for option in of_choice(group, choice):
        if not allows_one_value(option.declared):
            lines += _short(option)
    return lines


def _files_of(group: str, about: str, config_dir: Path | None, before: str) -> list[str]:
    """Return the files of a folder of conf/, each with what its first sentence says.

    ``before`` is what a user writes before the name of a file.
    """
    lines = _wrapped(about, "")
    # A file of the user's own folder replaces the file of the same name.
    files = {
        file.stem: file
        for folder in reversed(folders(config_dir))
        for file in (folder / group).glob("*.yaml")
    }
    for name, file in sorted(files.items()):
        lines += [f"  {before}{name}", *_wrapped(first_sentence(file))]
    return lines


def _short(option: HelpedOption) -> list[str]:
    limits = allowed(option)
    text = f"{option.declared['help']}{f' ({limits})' if limits else ''}"
    return [f"  {option.name}={shown(option.default)}", *_wrapped(text)]


def _long(found: Owners) -> list[str]:
    """Return the help of one option, which several choices of its group may have."""
    lines = [found[0][1].name]
    for number, same in enumerate(meanings(found)):
        lines += ["", *_meaning(same)] if number else _meaning(same)
    declared = found[0][1].declared
    if declared["resumable"] or declared["role"].value != "result":
        lines.append("  A run may be continued with another value.")
    return lines


def _meaning(found: Owners) -> list[str]:
    """Return meaning, defaults, type and range of an option, for choices that agree on them."""
    name, _, declared, owner = found[0][1]
    group, _, own_name = name.rpartition(".")
    said = [
        f"{value} with {group}={'|'.join(choices)}" if any(choices) else value
        for value, choices in defaults(found)
    ]
    lines = [*_wrapped(declared["help"], "  "), "", *_wrapped(f"default: {said[0]}", "  ")]
    for text in said[1:]:
        lines += _wrapped(text, " " * 11)
    lines.append(f"  type:    {_kind(get_type_hints(owner)[own_name])}")
    if limits := allowed(found[0][1]):
        lines += _wrapped(f"allowed: {limits}", "  ")
    if limit := _only_of(found):
        lines += _wrapped(limit, "  ")
    return lines


def _wrapped(text: str, indent: str = " " * 6) -> list[str]:
    joined = text.replace("|", "| ")
    wrapped = textwrap.wrap(joined, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return [line.replace("| ", "|") for line in wrapped]


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
