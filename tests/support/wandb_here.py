"""Fixtures: W&B without a key and a server, or with a stand-in for one."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import wandb_server

KEY = "0123456789" * 4
"""Of the form that W&B has."""


def end_service(patience_s=20):
    """End W&B's service of this process; kill it if it does not end by itself, which is rare."""
    import wandb

    def teardown():
        with suppress(SystemExit, ConnectionError):  # what a killed service leaves
            wandb.teardown()

    ends = threading.Thread(target=teardown, daemon=True)
    ends.start()
    ends.join(patience_s)
    if ends.is_alive():
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(FileNotFoundError):  # that process has ended meanwhile
                pid, name, _, parent = stat.read_text().split()[:4]
                if name.startswith("(wandb-core") and int(parent) == os.getpid():
                    os.kill(int(pid), signal.SIGKILL)
        ends.join(patience_s)
    assert not ends.is_alive(), "the service of W&B does not end"


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
    end_service()
    yield
    end_service()


@pytest.fixture
def stand_in(fresh_wandb, monkeypatch):
    """Of a server, and a key for it."""
    with wandb_server.serving() as server:
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        yield server
        end_service()
