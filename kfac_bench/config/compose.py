"""The way from YAML and the command line to a checked :class:`TrainConfig`.

Hydra merges the files of conf/ with the overrides; :func:`kfac_bench.config.train.check` checks the
result. All commands call :func:`load`. After :func:`from_composed` there is no DictConfig.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kfac_bench.config import (
    named_variables,
    problem_file,
    received_files,
    recipes,
)
from kfac_bench.config.command_options import quoted
from kfac_bench.config.compose_errors import usage_error, with_key
from kfac_bench.config.conf_files import CONF_DIR, folders, options_of, with_profiles
from kfac_bench.config.groups import TABLES
from kfac_bench.config.kfac import KFACConfig
from kfac_bench.config.option_table import no_such_option
from kfac_bench.config.options import allows_one_value, options
from kfac_bench.config.train import TrainConfig, check
from kfac_bench.errors import UsageError

__all__ = [
    "CONF_DIR",
    "GROUPS",
    "expanded",
    "from_composed",
    "load",
    "options_of",
    "shown",
    "to_yaml",
    "usage_error",
]


class _Schemas(dict[str, ConfigNode]):
    """The schemas of one group, as Hydra finds them; a row is imported when Hydra asks for it."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self._group = group

    # Hydra first asks whether a schema exists, and then takes it.

    def __contains__(self, file: object) -> bool:
        return str(file).removesuffix(".yaml") in TABLES[self._group]

    def __missing__(self, file: str) -> ConfigNode:
        name = file.removesuffix(".yaml")
        schema = OmegaConf.structured(TABLES[self._group][name])
        self[file] = ConfigNode(file, schema, f"schema/{self._group}", None, None)
        return self[file]


OmegaConf.register_new_resolver("oc.env", named_variables.value_of, replace=True)

_STORE = ConfigStore.instance()
_STORE.store("train", TrainConfig, group="schema")
_STORE.store("base", KFACConfig, group="schema/kfac")
_STORE.repo["schema"] |= {group: _Schemas(group) for group in TABLES}

GROUPS = (*TABLES, "kfac", "logger")
"""Groups of conf/ of which a run has one choice each."""


def load(
    overrides: Sequence[str], config_dir: Path | None = None, ranks: int | None = None
) -> TrainConfig:
    """Compose conf/train.yaml with the overrides, and check types and ranges.

    Args:
        overrides: Words of the command line, such as ``model=unet`` and ``seed=3``.
        config_dir: A folder of the user's own with the same groups (``experiment/mine.yaml``). It
            is searched after conf/.
        ranks: Number of ranks of a run that a user starts. None, as for benchmarks: no recipe
            follows from data and model (:mod:`kfac_bench.config.recipes`).

    Raises:
        UsageError: With one line, whatever is wrong.
    """
    recipe = recipes.choose(overrides, config_dir, ranks)
    overrides = recipes.apply(expanded(overrides, config_dir), recipe)
    search = _search_path(folders(config_dir)[:-1])
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            composed = compose("train", overrides=[*overrides, *search])
    except UsageError:
        raise
    except Exception as error:  # Hydra raises exceptions of many classes for a wrong word
        raise usage_error(error, overrides, config_dir) from None
    return from_composed(composed)


def _search_path(more: Sequence[Path]) -> list[str]:
    """Return the override that lets Hydra search folders beside conf/."""
    paths = ",".join(quoted(received_files.search_path(folder)) for folder in more)
    return [f"hydra.searchpath=[{paths}]"] if more else []


def expanded(overrides: Sequence[str], config_dir: Path | None = None) -> list[str]:
    """Replace ``from=``, ``profile=`` and ``problem=`` by options that Hydra knows.

    See :mod:`.received_files`, :mod:`.conf_files` and :mod:`.problem_file`.

    Raises:
        UsageError: One of these words is wrong, or a word is an option of Hydra itself.
    """
    words = received_files.without_hydra(overrides)
    if (deleted := next((w for w in words if w.startswith("~")), None)) is not None:
        raise UsageError(f"{deleted}: options cannot be deleted; give a value, such as kfac=none")
    words = received_files.run_again(words)
    return with_profiles(problem_file.expand(words), folders(config_dir))


def from_composed(composed: DictConfig) -> TrainConfig:
    """Return the typed, checked configuration.

    Variables of W&B fill options that are null, so that the record says where the run is in W&B.
    """
    try:
        _refuse_additions(composed)
        result = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise UsageError(with_key(str(error))) from None
    assert isinstance(result, TrainConfig)
    if (logger := result.logger).wandb:
        logger.project = logger.project or default_project()
        logger.entity = logger.entity or os.environ.get("WANDB_ENTITY")
        logger.id = logger.id or os.environ.get("WANDB_RUN_ID")
    check(result)
    return result


def default_project() -> str:
    """Return the W&B project of runs whose options name none."""
    return os.environ.get("WANDB_PROJECT") or "kfac_bench"


def _refuse_additions(node: Any, prefix: str = "") -> None:
    """Raise :class:`UsageError` for ``+key=value`` with a key that no code reads."""
    schema = OmegaConf.get_type(node)
    if not OmegaConf.is_dict(node) or schema is None or schema is dict:
        return
    known = {field.name for field in dataclasses.fields(schema)}
    for key in node:
        if key not in known:
            raise UsageError(no_such_option(f"{prefix}{key}", known))
        if not OmegaConf.is_missing(node, key):
            _refuse_additions(node[key], f"{prefix}{key}.")


def to_yaml(config: TrainConfig) -> str:
    """Return the resolved configuration, as ``config.yaml`` holds it."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def shown(found: TrainConfig) -> str:
    """Return the configuration as ``--cfg job`` prints it, without options that have no meaning."""
    tree = OmegaConf.create(to_yaml(found))
    for name, _, meta in options(found):
        if allows_one_value(meta):
            group, _, option = name.rpartition(".")
            del OmegaConf.select(tree, group)[option]
    return OmegaConf.to_yaml(tree)
