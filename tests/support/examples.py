"""Scripts of examples/, run in this process or on ranks."""

import contextlib
import io
import os
import runpy
from concurrent.futures import ThreadPoolExecutor

import torch

from tests.support import ROOT, forks


def run_example(name, folder, monkeypatch):
    """Run ``examples/name`` with ``folder`` as the current directory; return its variables."""
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    return runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def run_on_ranks(name):
    """Run ``examples/name`` on two ranks, with torchrun's variables; return what they print."""
    with forks.own_port() as port, ThreadPoolExecutor(2) as threads:
        return "".join(threads.map(lambda rank: forks.call(_rank, name, rank, port), range(2)))


def _rank(name, rank, port):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return said.getvalue()
