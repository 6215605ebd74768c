"""YAML and command line to a checked :class:`TrainConfig`; Hydra's errors as one clear line."""

from __future__ import annotations

import dataclasses
import difflib
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kfac_bench.config import profiles
from kfac_bench.config.checks import check
from kfac_bench.config.kfac import KFACConfig
from kfac_bench.config.options import options
from kfac_bench.config.registry import TABLES, options_class
from kfac_bench.config.train import LoggerConfig, TrainConfig, TrainerConfig
from kfac_bench.errors import UsageError

_PACKAGE = Path(__file__).parents[1]
CONF_DIR = next(p for p in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if p.is_dir())
"""conf/ of the wheel, or of the checkout."""


class _Schemas(dict[str, ConfigNode]):
    """The schemas of one group, as Hydra finds them; a row is imported when Hydra asks for it."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self._group = group

    def __contains__(self, file: object) -> bool:
        return str(file).removesuffix(".yaml") in TABLES[self._group]

    def __missing__(self, file: str) -> ConfigNode:
        name = file.removesuffix(".yaml")
        schema = OmegaConf.structured(options_class(self._group, name))
        self[file] = ConfigNode(file, schema, f"schema/{self._group}", None, None)
        return self[file]


_STORE = ConfigStore.instance()
_STORE.store("train", TrainConfig, group="schema")
_STORE.store("base", KFACConfig, group="schema/kfac")
_STORE.store("base", LoggerConfig, group="schema/logger")
_STORE.repo["schema"] |= {group: _Schemas(group) for group in TABLES}

GROUPS = (*TABLES, "kfac", "logger")
"""Config groups that each have one choice in a run."""


def load(overrides: Sequence[str], config_dir: Path | None = None) -> TrainConfig:
    """Compose conf/train.yaml with the overrides, check types and ranges.

    ``config_dir`` is a folder of the user's own with the same groups (``experiment/mine.yaml``);
    it is searched after ours. Raises :class:`UsageError`, always one line.
    """
    overrides = with_profile(overrides, config_dir)
    search = [] if config_dir is None else [f"hydra.searchpath=[file://{config_dir.resolve()}]"]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            composed = compose("train", overrides=[*overrides, *search])
    except Exception as error:  # whatever Hydra makes of the user's words
        raise usage_error(error, overrides, config_dir) from None
    return from_composed(composed)


def with_profile(overrides: Sequence[str], config_dir: Path | None = None) -> list[str]:
    """Resolve ``profile=`` to options that Hydra knows; see :mod:`kfac_bench.config.profiles`."""
    return profiles.apply(overrides, _folders(config_dir))


HYDRA_ERRORS = (yaml.YAMLError, HydraException, OmegaConfBaseException)


def usage_error(
    error: Exception, overrides: Sequence[str], config_dir: Path | None = None
) -> UsageError:
    """What Hydra raised while composing, as one line."""
    if isinstance(error, yaml.YAMLError):
        return UsageError(_describe_yaml(error))
    return UsageError(_describe(error, overrides, config_dir))


def from_composed(composed: DictConfig) -> TrainConfig:
    """The typed, checked configuration; nothing past this line sees a DictConfig."""
    try:
        _refuse_additions(composed)
        result = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise UsageError(_with_key(str(error))) from None
    assert isinstance(result, TrainConfig)
    check(result)
    return result


def _refuse_additions(node: Any, prefix: str = "") -> None:
    """``+key=value`` adds what no code reads: say so instead of ignoring it."""
    schema = OmegaConf.get_type(node)
    if not OmegaConf.is_dict(node) or schema is None or schema is dict:
        return
    known = {field.name for field in dataclasses.fields(schema)}
    for key in node:
        if key not in known:
            raise UsageError(f"{prefix}{key}: no such option{_did_you_mean(str(key), known)}")
        if not OmegaConf.is_missing(node, key):
            _refuse_additions(node[key], f"{prefix}{key}.")


def to_yaml(config: TrainConfig) -> str:
    """The resolved configuration, as ``config.yaml`` holds it."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def shown(found: TrainConfig) -> str:
    """The same for people, as ``--cfg job`` prints it: without options that mean nothing here.

    They have one value only, as the size of images where the data are text.
    """
    tree = OmegaConf.create(to_yaml(found))
    for name, _, meta in options(found):
        bounds = meta.get("bounds", {})
        if "at least" in bounds and bounds["at least"] == bounds.get("at most"):
            group, _, option = name.rpartition(".")
            del OmegaConf.select(tree, group)[option]
    return OmegaConf.to_yaml(tree)


def describe_options(config_dir: Path | None = None) -> str:
    """Every group with its choices and every option with its meaning, range and default."""
    lines = ["groups:"]
    for folder in sorted(p.name for p in CONF_DIR.iterdir() if p.is_dir()):
        if folder in (*GROUPS, "experiment"):
            choices = "| ".join(options_of(folder, config_dir))  # blanks: where a line may end
            wrapped = textwrap.wrap(f"  {folder}={choices}", 110, subsequent_indent=" " * 6)
            lines += [line.replace("| ", "|") for line in wrapped]
    lines.append("options:")
    defaults = list(options(load([])))
    lines += [_describe_option(*found) for found in defaults]
    shown = {name for name, *_ in defaults}
    for group, table in TABLES.items():  # options that only another choice of the group has
        for choice in table:
            for name, value, meta in options(options_class(group, choice)(), f"{group}."):
                if name not in shown:
                    shown.add(name)
                    lines.append(_describe_option(name, value, meta))
    return "\n".join(lines)


def _describe_option(name: str, value: Any, meta: dict[str, Any]) -> str:
    bounds = " and ".join(f"{word} {bound:g}" for word, bound in meta["bounds"].items())
    extra = "|".join(meta["choices"]) or bounds
    shown = "null" if value is None else str(value)
    return f"  {name}={shown}\n      {meta['help']}{f' ({extra})' if extra else ''}"


def options_of(group: str, config_dir: Path | None = None) -> list[str]:
    """Return the choices of a config group, such as ``options_of("model")``.

    A folder of profiles is one choice; the files of any other folder are one choice each.
    """
    names = set()
    for place in (d / group for d in _folders(config_dir)):
        names |= {p.stem for p in place.glob("*.yaml")}
        for path in place.glob("*/*.yaml"):
            is_profile = path.stem in profiles.PROFILES
            names.add(path.parent.name if is_profile else f"{path.parent.name}/{path.stem}")
    return sorted(names)


def _folders(config_dir: Path | None) -> list[Path]:
    """The user's own first, as Hydra's errors are about it rather than about ours."""
    return [d for d in (config_dir, CONF_DIR) if d is not None]


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _choose(word: str, choices: Sequence[str]) -> str:
    """Say what to choose from: every name, or only similar names where a line has no room."""
    # Experiments had flat names before they got folders: digits_resnet is digits/resnet now.
    moved = [c for c in choices if word in (c.replace("/", "_"), c.rpartition("/")[2])]
    if moved:
        return f"; did you mean {min(moved, key=lambda c: c.replace('/', '_') != word)}?"
    if len(choices) <= 40:
        known = ", ".join(choices) or "none: the folder is empty"
        return f"{_did_you_mean(word, choices)}; choose one of {known}"
    like = [name for name in choices if word in name] or difflib.get_close_matches(word, choices, 5)
    meant = f"; did you mean {', '.join(like[:5])}?" if like else ""
    return f"{meant or ';'} kfac-train --help lists all {len(choices)}"


def _describe_yaml(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or _first_line(error)
    if mark is None:
        return f"{getattr(error, 'name', 'YAML')}: not valid YAML: {problem}"
    return f"{mark.name}:{mark.line + 1}: not valid YAML: {problem}"


def _describe(error: Exception, overrides: Sequence[str], config_dir: Path | None) -> str:
    """One line from what Hydra raised; its texts are the only interface it has."""
    text, cause = str(error), error.__cause__
    if found := re.search(r"Could not find '([^/']+)/([^']*)'", text):
        group, name = found.groups()
        choices = options_of(group, config_dir)
        return f"{group}={name}: no such {group}{_choose(name, choices)}"
    where = _file_and_line(text, config_dir)
    detail = text if cause is None else str(cause)
    detail = re.sub(r"^In '[^']+': \w+ raised while composing config:\n", "", detail)
    if isinstance(error, UnicodeDecodeError):
        return f"{_undecodable(config_dir) or 'a configuration file'}: not UTF-8 text ({text})"
    if "Key 'experiment' not in 'TrainConfig'" in detail:
        return f"{where}an experiment file starts with the line '# @package _global_'"
    if found := re.search(r"Key '([^']+)' (?:is )?not in '?(\w+)'?", detail):
        key, schema = found.groups()
        full = _full_key(detail) or key
        parent = full.rpartition(".")[0]
        known = _known_keys(schema, parent)
        return f"{where}{full}: no such option{_did_you_mean(key, known)}"
    if found := re.search(
        r"Value '(.*?)'.* (?:could not be converted to|is not a valid) (\w+)", detail, re.DOTALL
    ):
        value, kind = found.groups()
        return f"{where}{_full_key(detail) or 'option'}={value}: expected {_kind(kind)}"
    if type(error).__name__ == "OverrideParseException":
        given = next((o for o in overrides if o.strip() and o in text), " ".join(overrides))
        return f"{given!r} is not an override: write option=value, quote special characters"
    if "Could not override" in text and (found := re.search(r"override '([^']+)'", text)):
        key = found[1]
        groups = [p.name for p in CONF_DIR.iterdir() if p.is_dir()]
        return f"{where}{key}: no such option or group{_did_you_mean(key, groups)}"
    if "Ambiguous value" in text:
        return f"{_first_line(error)}: give one value, or add --multirun to run each"
    if isinstance(error, ValueError) and "Config group override" in text:
        given = " ".join(overrides)
        return f"{given}: {_first_line(error)}: a group is chosen by name, as in kfac=comm_opt"
    if isinstance(error, HydraException | OmegaConfBaseException):
        return f"{where}{_with_key(detail)}"
    return f"{' '.join(overrides)}: {_first_line(error)}"


def _with_key(text: str) -> str:
    """The first line of OmegaConf's text, after the option that it is about."""
    key = _full_key(text)
    return f"{key}: {_first_line(text)}" if key else _first_line(text)


def _undecodable(config_dir: Path | None) -> Path | None:
    for folder in _folders(config_dir):
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
    """Return the options of a class of options by its name; at the top, the groups too."""
    classes = [TrainConfig, TrainerConfig, KFACConfig, LoggerConfig]
    classes += [options_class(group, name) for group, table in TABLES.items() for name in table]
    names = {f.name for c in classes if c.__name__ == schema for f in dataclasses.fields(c)}
    return names | ({"experiment"} if not parent else set())


def _kind(kind: str) -> str:
    article = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
    return article.get(kind, kind.lower())


def _file_and_line(text: str, config_dir: Path | None) -> str:
    """Where the key of an "In 'experiment/x': ..." error stands: "path:line: ", or empty."""
    found = re.search(r"In '([^']+)':", text)
    if not found or found[1] == "train":
        return ""
    path = next((p for d in _folders(config_dir) if (p := d / f"{found[1]}.yaml").is_file()), None)
    if path is None:
        return ""
    names = [_full_key(text), *re.findall(r"override '([^'@]+)", text)]
    key = next((n.rpartition(".")[2] for n in names if n), None)
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if key and re.search(rf"(?:^|[\s{{/,]){re.escape(key)}\s*:", line):
            return f"{path}:{number}: "
    return f"{path}: "


def _first_line(error: object) -> str:
    return str(error).strip().split("\n")[0]
