"""The contest adds files and optimizers to the package; here only while a test runs."""

import pytest

from benchmarks.contest import setup
from kfac_bench.benchmark import local_runs
from kfac_bench.config import conf_files
from kfac_bench.optimizers import options
from tests.support import forks

local_runs.PRELOAD = forks.PRELOAD


@pytest.fixture(autouse=True)
def _contest(monkeypatch):
    monkeypatch.setattr(conf_files, "ADDED", [])
    monkeypatch.setattr(local_runs, "BEFORE_TRAINING", [])
    for name, choice in setup.OPTIMIZERS.items():
        monkeypatch.setitem(options.CHOICES, name, choice)
    setup.enable()
