"""Fixtures: W&B without a key and a server, or with a stand-in for one."""

import os

import pytest

from tests.support import wandb_server

KEY = "0123456789" * 4
"""Of the form that W&B has."""


@pytest.fixture
def fresh_wandb(monkeypatch, tmp_path):
    """No key, no settings file, no proxy of this machine; nothing of an earlier test."""
    import wandb

    for name in os.environ:
        if name.startswith("WANDB_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.chdir(tmp_path)
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture
def stand_in(fresh_wandb, monkeypatch):
    """Of a server, and a key for it."""
    import wandb

    with wandb_server.serving() as server:
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        yield server
        wandb.teardown()
