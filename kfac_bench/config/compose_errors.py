"""Errors of Hydra and OmegaConf as one clear line.

The texts of their exceptions are the only interface that they offer, so this file takes the texts
apart. It knows nothing of how a configuration is composed: :mod:`kfac_bench.config.compose` does.
"""

import dataclasses
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from kfac_bench.config import received_files
from kfac_bench.config.command_options import quoted
from kfac_bench.config.conf_files import CONF_DIR, folders, options_of
from kfac_bench.config.groups import TABLES
from kfac_bench.config.kfac import KFACConfig
from kfac_bench.config.option_table import (
    did_you_mean,
    no_such_choice,
    no_such_option,
    what_to_choose,
)
from kfac_bench.config.train import LoggerConfig, TrainConfig, TrainerConfig
from kfac_bench.errors import UsageError


def usage_error(
    error: Exception, overrides: Sequence[str], config_dir: Path | None = None
) -> UsageError:
    """Return an error of Hydra's composition as one line."""
    failure = _Failure(error, overrides, config_dir)
    for describe in _DESCRIPTIONS:
        if (line := describe(failure)) is not None:
            return UsageError(line)
    return UsageError(f"{' '.join(overrides)}: {_first_line(error)}")


def with_key(text: str) -> str:
    """Return the first line of OmegaConf's text, after the option that the text is about."""
    key = _full_key(text)
    return f"{key}: {_first_line(text)}" if key else _first_line(text)


@dataclass(frozen=True)
class _Failure:
    """An exception of Hydra or OmegaConf, with the command line that caused it."""

    error: Exception
    overrides: Sequence[str]
    config_dir: Path | None

    @cached_property
    def text(self) -> str:
        """The text of the exception."""
        return str(self.error)

    @cached_property
    def detail(self) -> str:
        """The text of OmegaConf, where Hydra passes it on."""
        cause = self.error.__cause__
        text = self.text if cause is None else str(cause)
        return re.sub(r"^In '[^']+': \w+ raised while composing config:\n", "", text)

    @cached_property
    def where(self) -> str:
        """``path:line: `` of the file that the exception is about, or nothing."""
        return _file_and_line(self.text, self.config_dir)

    @cached_property
    def given(self) -> str:
        """The override that the exception is about, or else its option."""
        key = _full_key(self.detail) or "option"
        return next((o for o in self.overrides if o.lstrip("+").startswith(f"{key}=")), key)


# ---- the descriptions, in the order in which they are tried; each returns None if it does not fit


def _invalid_yaml(failure: _Failure) -> str | None:
    error = failure.error
    if not isinstance(error, yaml.YAMLError):
        return None
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or _first_line(error)
    if mark is None:
        return f"{getattr(error, 'name', 'YAML')}: not valid YAML: {problem}"
    return f"{mark.name}:{mark.line + 1}: not valid YAML: {problem}"


def _unknown_choice(failure: _Failure) -> str | None:
    found = re.search(r"Could not (?:find|load) '(?!schema/)([^/']+)/([^']*)'", failure.text)
    if not found:
        return None
    group, word = found.groups()
    return no_such_choice(group, word, options_of(group, failure.config_dir))


def _unknown_row(failure: _Failure) -> str | None:
    found = re.search(r"Could not load 'schema/(\w+)/(\w+)'", failure.text)
    if not found:
        return None
    group, name = found.groups()
    table = f"CHOICES in {TABLES[group].file}" if group in TABLES else "kfac_bench"
    return (
        f"{failure.where}/schema/{group}/{name}: {table} has no such row"
        f"{what_to_choose(name, list(TABLES.get(group, ())))}"
    )


def _not_text(failure: _Failure) -> str | None:
    if not isinstance(failure.error, UnicodeDecodeError):
        return None
    path = _undecodable(failure.config_dir) or "a configuration file"
    return f"{path}: not UTF-8 text ({failure.text})"


def _no_package(failure: _Failure) -> str | None:
    if "Key 'experiment' not in 'TrainConfig'" not in failure.detail:
        return None
    return f"{failure.where}an experiment file starts with the line '# @package _global_'"


def _unknown_option(failure: _Failure) -> str | None:
    found = re.search(r"Key '([^']+)' (?:is )?not in '?(\w+)'?", failure.detail)
    if not found:
        return None
    key, schema = found.groups()
    full = _full_key(failure.detail) or key
    group = full.rpartition(".")[0]
    line = failure.where + no_such_option(full, _known_keys(schema, group))
    if failure.where and "the chosen" in line:
        line += f". The file is meant for its own {group}: leave out {group}=, or use another file"
    return line


def _wrong_type(failure: _Failure) -> str | None:
    found = re.search(
        r"Value '(.*?)'(?: of type '\w+')? (?:could not be converted to|is not a valid) (\w+)",
        failure.detail,
        re.DOTALL,
    )
    if not found:
        return None
    value, kind = found.groups()
    articles = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
    expected = articles.get(kind, kind.lower())
    return f"{failure.where}{_full_key(failure.detail) or 'option'}={value}: expected {expected}"


def _no_list(failure: _Failure) -> str | None:
    if "is not a ListConfig, list or tuple" not in failure.detail:
        return None
    key, equals, value = failure.given.partition("=")
    example = f"{key}=[{value}]" if equals else f"{key}: [a, b]"
    return f"{failure.where}{failure.given}: expected a list, such as {example}"


def _no_options(failure: _Failure) -> str | None:
    if "Cannot merge DictConfig with ListConfig" in failure.detail:
        return f"{failure.where}is a list: write one option: value in each line"
    found = re.search(r": \w+ is not a subclass of (\w+)\. value: (.*)", failure.detail)
    if not found:
        return None
    name, value = found.groups()
    of_class = [f.name for f in dataclasses.fields(TrainConfig) if name in str(f.type)]
    key = of_class[0] if of_class else name
    return f"{failure.where}{key}: {value}: expected lines with options below {key}:"


def _null(failure: _Failure) -> str | None:
    if not re.search(r"field '\S+' is not Optional", failure.detail):
        return None
    return f"{failure.where}{_full_key(failure.detail)}=null: the option needs a value"


def _no_override(failure: _Failure) -> str | None:
    if type(failure.error).__name__ != "OverrideParseException":
        return None
    given = next((o for o in failure.overrides if not _is_override(o)), None)
    given = " ".join(failure.overrides) if given is None else given
    name, equals, value = given.partition("=")
    if not equals or not value.strip() or not _is_override(f"{name}={quoted(value)}"):
        return f"{given!r} is not an override: write option=value"
    hint = _as_text(given)
    if value.startswith("~/"):  # a shell replaces ~ only where a word begins
        hint = f"Write {name}=$HOME{value[1:]}"
    return f"{given!r} is not an override: Hydra cannot read the value. {hint}"


def _is_override(word: str) -> bool:
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return True


def _no_text(failure: _Failure) -> str | None:
    found = re.search(r"Cannot convert '(\w+)' to string", failure.detail)
    if not found or "=" not in failure.given:
        return None
    return f"{failure.given}: expected a text, got a {found[1]}. {_as_text(failure.given)}"


def _as_text(word: str) -> str:
    """Return the hint to quote a value that is a text, with the quoted word."""
    name, _, value = word.partition("=")
    word = f"{name}={quoted(value)}"
    is_plain = word.isprintable() and not set(word) & set('"$`\\!')
    word = f'"{word}"' if is_plain else shlex.quote(word)
    return f"If the value is a text, quote it: {word}"


def _unknown_group(failure: _Failure) -> str | None:
    found = re.search(r"override '([^']*)'", failure.text)
    if "Could not override" not in failure.text or not found:
        return None
    if not found[1]:
        return f"{' '.join(failure.overrides)}: an option has no name: write option=value"
    groups = [path.name for path in CONF_DIR.iterdir() if path.is_dir()]
    return f"{failure.where}{found[1]}: no such option or group{did_you_mean(found[1], groups)}"


def _several_values(failure: _Failure) -> str | None:
    if "Ambiguous value" not in failure.text:
        return None
    line = f"{_first_line(failure.error)}: give one value, or add --multirun to run each"
    found = re.search(r"Ambiguous value for argument '(.+)'$", _first_line(failure.error))
    is_path = found is not None and "/" in found[1].partition("=")[2]
    return f"{line}. {_as_text(found[1])}" if found and is_path else line


def _interval(failure: _Failure) -> str | None:
    if "Can only enumerate" not in failure.text:
        return None
    words = " ".join(failure.overrides)
    return f"{words}: this names no single values. List them, as in kfac.damping=0.01,0.1"


def _no_name(failure: _Failure) -> str | None:
    if not isinstance(failure.error, ValueError) or "Config group override" not in failure.text:
        return None
    given, problem = " ".join(failure.overrides), _first_line(failure.error)
    return f"{given}: {problem}: a group is chosen by name, as in kfac=comm_opt"


def _other(failure: _Failure) -> str | None:
    if not isinstance(failure.error, HydraException | OmegaConfBaseException):
        return None
    return f"{failure.where}{with_key(failure.detail)}"


_DESCRIPTIONS: tuple[Callable[[_Failure], str | None], ...] = (
    _invalid_yaml,
    _unknown_choice,
    _unknown_row,
    _not_text,
    _no_package,
    _unknown_option,
    _wrong_type,
    _no_list,
    _no_options,
    _no_text,
    _null,
    _no_override,
    _unknown_group,
    _several_values,
    _interval,
    _no_name,
    _other,
)


# ---- what the texts say


def _undecodable(config_dir: Path | None) -> Path | None:
    for folder in folders(config_dir):
        for path in sorted(folder.rglob("*.yaml")):
            try:
                path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                return path
    return None


def _full_key(text: str) -> str | None:
    found = re.search(r"full_key: (\S+)", text)
    return found[1] if found else None


def _known_keys(schema: str, parent: str) -> set[str]:
    """Return the names of the options of a class; at the top, also those of groups."""
    classes = [TrainConfig, TrainerConfig, KFACConfig, LoggerConfig]
    classes += [choice for table in TABLES.values() for choice in table.values()]
    names = {f.name for c in classes if c.__name__ == schema for f in dataclasses.fields(c)}
    return names | ({"experiment", "recipe"} if not parent else set())


def _file_and_line(text: str, config_dir: Path | None) -> str:
    """Return "path:line: " of the key that an "In 'experiment/x': ..." error is about, or ""."""
    found = re.search(r"In '([^']+)':", text)
    if not found or found[1] == "train":
        return ""
    if found[1] == f"experiment/{received_files.NODE}":
        return "the file that from= names: "
    path = next((p for d in folders(config_dir) if (p := d / f"{found[1]}.yaml").is_file()), None)
    if path is None:
        return ""
    names = [_full_key(text), *re.findall(r"override '([^'@]+)", text)]
    key = next((n.rpartition(".")[2] for n in names if n), None)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if key and re.search(rf"(?:^|[\s{{/,]){re.escape(key)}\s*:", line):
            return f"{path}:{number}: "
    return f"{path}: "


def _first_line(error: object) -> str:
    return str(error).strip().split("\n")[0]
