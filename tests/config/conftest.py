"""Tests of the configuration compose as users do."""

import pytest


@pytest.fixture(autouse=True)
def quick_composition():
    """Leave the composition to Hydra."""
