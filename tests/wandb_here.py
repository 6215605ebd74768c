"""W&B without a key and a server, for tests: offline runs, read with W&B's own reader."""

import os

import pytest
import wandb


@pytest.fixture
def fresh_wandb(monkeypatch, tmp_path):
    """No key, no settings file, no proxy of this machine; nothing of an earlier test."""
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
