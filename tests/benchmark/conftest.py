"""Benchmarks compose a configuration for each of their cells."""

import pytest

from kfac_bench.config import compose
from tests.support.configs import quick_load


@pytest.fixture(autouse=True)
def _quick_composition(monkeypatch):
    """Compose each set of choices once in a process."""
    monkeypatch.setattr(compose, "load", quick_load)
