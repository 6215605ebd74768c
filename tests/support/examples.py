"""Scripts of examples/, run in this process."""

import runpy

import torch

from tests.support import ROOT


def run_example(name, folder, monkeypatch):
    """Run ``examples/name`` with ``folder`` as the current directory; return its variables."""
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    return runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
