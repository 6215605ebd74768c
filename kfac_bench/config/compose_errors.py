"""Errors of Hydra and OmegaConf as one clear line.

The texts of their exceptions are the only interface that they offer, so this file takes the texts
apart. It knows nothing of how a configuration is composed: :mod:`kfac_bench.config.compose` does.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from kfac_bench.config.conf_files import CONF_DIR, folders, options_of
from kfac_bench.config.kfac import KFACConfig
from kfac_bench.config.registry import TABLES, options_class
from kfac_bench.config.train import LoggerConfig, TrainConfig, TrainerConfig
from kfac_bench.errors import UsageError


def usage_error(
    error: Exception, overrides: Sequence[str], config_dir: Path | None = None
) -> UsageError:
    """Return what Hydra raised while it composed, as one line."""
    if isinstance(error, yaml.YAMLError):
        return UsageError(_describe_yaml(error))
    return UsageError(_describe(error, overrides, config_dir))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the most similar known word, or nothing."""
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
        return f"{did_you_mean(word, choices)}; choose one of {known}"
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
    """Return one line for an exception; the first description that fits is taken."""
    text, cause = str(error), error.__cause__
    if found := re.search(r"Could not find '([^/']+)/([^']*)'", text):
        group, name = found.groups()
        choices = options_of(group, config_dir)
        return f"{group}={name}: no such {group}{_choose(name, choices)}"
    if found := re.search(r"Could not load 'schema/(\w+)/(\w+)'", text):
        group, name = found.groups()
        where = _file_and_line(text, config_dir)
        return (
            f"{where}/schema/{group}/{name}: kfac_bench/config/registry.py has no such row"
            f"{_choose(name, list(TABLES.get(group, ())))}"
        )
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
        return f"{where}{full}: no such option{did_you_mean(key, known)}"
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
        return f"{where}{key}: no such option or group{did_you_mean(key, groups)}"
    if "Ambiguous value" in text:
        return f"{_first_line(error)}: give one value, or add --multirun to run each"
    if isinstance(error, ValueError) and "Config group override" in text:
        given = " ".join(overrides)
        return f"{given}: {_first_line(error)}: a group is chosen by name, as in kfac=comm_opt"
    if isinstance(error, HydraException | OmegaConfBaseException):
        return f"{where}{with_key(detail)}"
    return f"{' '.join(overrides)}: {_first_line(error)}"


def with_key(text: str) -> str:
    """Return the first line of OmegaConf's text, after the option that the text is about."""
    key = _full_key(text)
    return f"{key}: {_first_line(text)}" if key else _first_line(text)


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
    """Return the options of a class of options by its name; at the top, the groups too."""
    classes = [TrainConfig, TrainerConfig, KFACConfig, LoggerConfig]
    classes += [options_class(group, name) for group, table in TABLES.items() for name in table]
    names = {f.name for c in classes if c.__name__ == schema for f in dataclasses.fields(c)}
    return names | ({"experiment"} if not parent else set())


def _kind(kind: str) -> str:
    article = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
    return article.get(kind, kind.lower())


def _file_and_line(text: str, config_dir: Path | None) -> str:
    """Return "path:line: " of the key that an "In 'experiment/x': ..." error is about, or ""."""
    found = re.search(r"In '([^']+)':", text)
    if not found or found[1] == "train":
        return ""
    path = next((p for d in folders(config_dir) if (p := d / f"{found[1]}.yaml").is_file()), None)
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
