"""torchrun in a fork, whose ranks are forks too: no process imports torch again.

The options, the agent, the rendezvous and the restarts are torchrun's own. Only the ranks do not
begin with a new interpreter. tests/cli/test_cli.py starts a real torchrun.
"""

import functools
import os
import runpy
import signal
import sys
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tests.support import forks

PATIENCE_S = 240


class Agent:
    """``torchrun OPTIONS -m kfac_bench OVERRIDES`` with ``folder`` as the current directory."""

    def __init__(self, folder, options, overrides):
        self._files = folder / f"agent{time.monotonic_ns()}"
        self._files.mkdir()
        arguments = (str(folder), str(self._files), [*options], [*overrides])
        self._process = forks.server().Process(target=_agent, args=arguments)
        self._process.start()

    @property
    def said(self):
        """The text of the ranks on stderr, without the tracebacks that the agent prints."""
        return (self._files / "ranks").read_text()

    def rank(self, rank):
        """Return the process id of a rank, since the last restart."""
        return int((self._files / f"pid{rank}").read_text())

    def kill(self):
        """Kill the agent and its ranks, unless the agent has ended: then its ranks have too."""
        if self._process.exitcode is None:
            ranks = [int(file.read_text()) for file in self._files.glob("pid[0-9]")]
            for pid in (self._process.pid, *ranks):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.join()

    def exit_code(self):
        """Wait for the end. An agent that hangs fails the test with its output."""
        self._process.join(PATIENCE_S)
        if self._process.exitcode is None:
            pytest.fail(f"the launcher hangs:\n{self.said}{(self._files / 'agent').read_text()}")
        return self._process.exitcode


def _agent(folder, files, options, overrides):
    from torch.distributed import run

    forks.prepare()
    _move(folder, f"{files}/agent")
    # A tracker of its own: it ends with the agent, and reports there what a killed agent has left.
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None
    launch = run.elastic_launch
    run.elastic_launch = lambda config, entrypoint: functools.partial(
        launch(config, _rank), folder, files
    )
    run.main([*options, "--start-method=forkserver", "-m", "kfac_bench", *overrides])


def _rank(folder, files, *words):
    forks.prepare()
    _move(folder, f"{files}/ranks")
    own = Path(files, f"pid{os.environ['RANK']}")
    own.with_suffix(".partial").write_text(str(os.getpid()))
    own.with_suffix(".partial").rename(own)
    sys.argv = ["kfac-train", *words[words.index("kfac_bench") + 1 :]]
    leave = os._exit

    def end(code):
        if code:
            leave(code)
        raise SystemExit(0)

    # torch's agent expects of a function that it returns, and kfac-train ends with os._exit().
    os._exit = end
    try:
        runpy.run_module("kfac_bench", run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise
    finally:
        os._exit = leave


def _move(folder, said):
    """Work in ``folder``, and print errors into the file ``said``."""
    os.chdir(folder)
    said = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
