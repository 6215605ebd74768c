"""What the tests of conf/ and the command line share."""

import pytest

from kfac_bench.config import compose
from kfac_bench.errors import UsageError

GROUPS = ("model", "optimizer", "schedule", "kfac", "data", "task", "backend", "logger")
DEFAULT = compose.load([])


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
