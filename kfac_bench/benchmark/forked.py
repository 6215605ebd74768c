"""Runs in processes of their own that need not import torch anew.

A server process imports all once (multiprocessing's forkserver) and each run is a fork of it, with
the environment that the caller has then: the imports of a short run take longer than the run.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kfac_bench.config import compose
from kfac_bench.errors import UsageError

PRELOAD = (
    "kfac_bench.training.run",
    "kfac_bench.distributed",
    "pytorch_optimizer",
)


def train(overrides: Sequence[str]) -> tuple[int, str]:
    """Train what the overrides say; the exit code of ``kfac-train``, and the last line it printed.

    A code below 0 is the signal that killed it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        process = context.Process(target=_train, args=(list(overrides), str(said), {**os.environ}))
        process.start()
        process.join()
        lines = said.read_text(errors="replace").strip().splitlines() if said.exists() else []
    assert process.exitcode is not None
    return process.exitcode, lines[-1] if lines else "no output"


def _train(overrides: list[str], said: str, environment: dict[str, str]) -> None:
    """In the fork: standard output and error go to the file ``said``."""
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # of the loader's, as without a fork
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from kfac_bench.training import run  # torch: in the server only

    try:
        code = run.start(compose.load(overrides))
    except UsageError as error:
        print(error, flush=True)  # noqa: T201
        code = 2
    sys.exit(code)
