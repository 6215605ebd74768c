"""Runs in forked processes, which need not import torch again.

The imports of a short run take longer than the run itself. So a server process imports everything
once (multiprocessing's forkserver). Each run is a fork of the server, with the environment that the
caller has at that moment.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from kfac_bench.config import compose, named_variables, problem_file
from kfac_bench.errors import UsageError, one_line
from kfac_bench.output import say

PRELOAD = (
    "kfac_bench.training.run",
    "kfac_bench.distributed",
    "pytorch_optimizer",
)


def train(overrides: Sequence[str]) -> tuple[int, str]:
    """Train with the overrides; return the exit code of ``kfac-train`` and its last printed line.

    A code below 0 is the number of the signal that killed the process. A problem file that
    the user's command line has named runs again in the process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        named = (problem_file.paths(), named_variables.allowed())
        arguments = (list(overrides), str(output), {**os.environ}, *named)
        process = context.Process(target=_train, args=arguments)
        try:
            process.start()
        except (OSError, EOFError) as error:
            return 1, f"the server that starts runs cannot be reached ({one_line(error)})"
        process.join()
        lines = output.read_text(errors="replace").strip().splitlines() if output.exists() else []
    assert process.exitcode is not None
    return process.exitcode, lines[-1] if lines else "no output"


def _train(
    overrides: list[str],
    output: str,
    environment: dict[str, str],
    problems: list[str],
    variables: list[str],
) -> None:
    """Train in the fork, with standard output and standard error in the file ``output``."""
    os.environ.clear()
    os.environ.update(environment)
    # Data loaders start their workers by fork, as in a process that was not forked itself.
    multiprocessing.set_start_method("fork", force=True)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    _end_with_caller()
    from kfac_bench.training import run  # Only the server imports torch, not the caller.

    try:
        named_variables.allow(variables)
        for path in problems:
            problem_file.run_named([f"{problem_file.WORD}{path}"])
        code = run.start(compose.load(overrides))
    except UsageError as error:
        say(str(error))
        code = 2
    sys.exit(code)


def _end_with_caller() -> None:
    """Save and end the run if the process that waits for the run dies.

    Otherwise the run would keep its directory, and a second start of the command could not go on.
    """
    caller = multiprocessing.parent_process()
    if caller is None:
        return

    def watch() -> None:
        caller.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
