"""What the tests of conf/ and the command line share, and a quick way to compose for all others."""

import copy
import functools
import os

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from omegaconf import OmegaConf, ValueNode

from kfac_bench import config
from kfac_bench.config import compose, conf_files, problem_file, recipes
from kfac_bench.errors import UsageError

GROUPS = ("model", "optimizer", "schedule", "kfac", "data", "task", "backend", "logger")
OF_A_PROBLEM = ("data.sha256", *(f"{group}.file" for group in problem_file.GROUPS))
CHOICES = (*GROUPS, "experiment", "profile", *OF_A_PROBLEM)
"""What Hydra composes. The groups of a problem are refused without its file."""
DEFAULT = compose.load([])

OF_WANDB = ("logger.wandb", "logger.project", "logger.entity", "logger.id")
VARIABLES = ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_ID")
"""Variables that fill options of the logger which are null."""

_load = compose.load


@functools.cache
def _composed(places, *choices):
    return _load(choices)


@functools.cache
def _tree(places, *choices):
    """Return the same as OmegaConf, which knows the type of each option."""
    return OmegaConf.structured(_composed(places, *choices))


@functools.cache
def _parsed(override):
    return OverridesParser.create().parse_override(override)


@functools.cache
def _value(override, places, *choices):
    """Return the value of an option as OmegaConf converts it, which raises if the type is wrong."""
    parsed = _parsed(override)
    path, _, name = parsed.key_or_group.rpartition(".")
    value, tree = parsed.value(), _tree(places, *choices)
    assert parsed.type == OverrideType.CHANGE
    assert not isinstance(value, dict), "a part of an option"
    assert "${" not in override, "a value that changes"
    section = OmegaConf.select(tree, path) if path else tree
    node = section._get_node(name)
    if isinstance(node, ValueNode) and not isinstance(value, list):
        node = copy.deepcopy(node)
        node._set_value(value)
        return node._value()
    section = copy.deepcopy(section)
    OmegaConf.update(section, name, value)
    found = OmegaConf.to_object(section)
    return found[name] if isinstance(found, dict) else getattr(found, name)


def quick_load(overrides, config_dir=None, ranks=None):
    """Return what ``compose.load`` returns, a hundred times as fast where only values differ.

    Hydra composes each set of choices (``model=resnet8``, ``experiment=mine``) once in a process;
    the values (``trainer.max_steps=3``) are then set in a copy. Hydra composes whatever this
    function cannot compose, and raises what a user would see.
    """
    if config_dir is not None:
        return _load(overrides, config_dir, ranks)
    try:
        assert recipes.choose(overrides, None, ranks) is None
        keys = {text: _parsed(text).key_or_group for text in overrides}
        choices = [text for text in overrides if keys[text] in CHOICES]
        places = (compose.CONF_DIR, *conf_files.ADDED, *map(os.environ.get, VARIABLES))
        found = copy.deepcopy(_composed(places, *choices))
        for text in overrides:
            if keys[text] not in CHOICES:
                assert keys[text] not in OF_WANDB
                *path, name = keys[text].split(".")
                section = functools.reduce(_member, path, found)
                value = copy.deepcopy(_value(text, places, *choices))
                if isinstance(section, dict):
                    section[name] = value
                else:
                    assert hasattr(section, name)
                    setattr(section, name, value)
    except Exception:
        return _load(overrides, None, ranks)
    config.check(found)
    return found


def _member(section, name):
    return section[name] if isinstance(section, dict) else getattr(section, name)


def refused(overrides, config_dir=None):
    """The one line with which the overrides are refused."""
    with pytest.raises(UsageError) as caught:
        compose.load(overrides, config_dir)
    text = str(caught.value)
    assert len(text.splitlines()) == 1, repr(text)
    assert text.isprintable(), repr(text)
    return text


class Own:
    """Experiment files in a folder of the user's own, and what is composed with it."""

    def __init__(self, path):
        self.path = path

    def write(self, name, text):
        file = self.path / "experiment" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    def load(self, *overrides):
        return compose.load(overrides, self.path)

    def refused(self, *overrides):
        return refused(overrides, self.path)
