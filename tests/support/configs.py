"""What the tests of conf/ and the command line share, and a quick way to compose for all others."""

import functools

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from omegaconf import OmegaConf

from kfac_bench import config
from kfac_bench.config import compose, conf_files, problem_file
from kfac_bench.errors import UsageError

GROUPS = ("model", "optimizer", "schedule", "kfac", "data", "task", "backend", "logger")
OF_A_PROBLEM = ("data.sha256", *(f"{group}.file" for group in problem_file.GROUPS))
CHOICES = (*GROUPS, "experiment", "profile", *OF_A_PROBLEM)
"""What Hydra composes. The groups of a problem are refused without its file."""
DEFAULT = compose.load([])


_load = compose.load


@functools.cache
def _composed(folders, *choices):
    return _load(choices)


@functools.cache
def _parsed(override):
    return OverridesParser.create().parse_override(override)


def quick_load(overrides, config_dir=None):
    """Return what ``compose.load`` returns, eight times as fast where only values differ.

    Hydra composes each set of choices (``model=resnet8``, ``experiment=mine``) once in a process;
    the values (``trainer.max_steps=3``) are then set in a copy. For all tests but those of the
    composition. What cannot be set raises what ``compose.load`` raises.
    """
    if config_dir is not None:
        return _load(overrides, config_dir)
    try:
        parsed = [_parsed(override) for override in overrides]
        is_choice = [o.key_or_group in CHOICES for o in parsed]
        choices = [text for text, choice in zip(overrides, is_choice, strict=True) if choice]
        tree = OmegaConf.structured(_composed((compose.CONF_DIR, *conf_files.ADDED), *choices))
        for override, choice in zip(parsed, is_choice, strict=True):
            if not choice:
                assert override.type == OverrideType.CHANGE
                OmegaConf.update(tree, override.key_or_group, override.value())
        found = OmegaConf.to_object(tree)
        config.check(found)
    except Exception:
        # The real composition decides: it succeeds, or it raises what a user would see.
        return _load(overrides)
    return found


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
