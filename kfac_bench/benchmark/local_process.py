"""One run of kfac-train as processes of this machine: its command and its outcome."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
"""The number of this request in linux/prctl.h."""
END_S = 60
"""Seconds that a command may take to save and to end after SIGTERM."""


def local_command(overrides: Sequence[str], ranks: int) -> list[str]:
    """Return the command that trains on so many ranks of this machine."""
    program = ["kfac_bench.benchmark.local_ranks", str(ranks)] if ranks > 1 else ["kfac_bench"]
    # The settings are those of the table, and no recipe that follows from data and model.
    return [sys.executable, "-m", *program, "recipe=none", *overrides]


def rank_command(overrides: Sequence[str]) -> list[str]:
    """Return the command of one rank, for srun to start on every rank."""
    return local_command(overrides, 1)


def run(command: Sequence[str], timeout_s: float | None = None) -> tuple[int, str]:
    """Run the command; return its exit code and the line that names the error.

    On Linux the command gets SIGTERM if this process dies. torchrun passes the signal on to its
    ranks, which save and end.

    If this process stops waiting, after `timeout_s` or at Ctrl-C, the command gets SIGTERM first.

    Raises :class:`subprocess.TimeoutExpired` after `timeout_s`.
    """
    with subprocess.Popen(  # noqa: S603
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        preexec_fn=None if _LIBC is None else _end_with_caller,
    ) as process:
        try:
            output, error = process.communicate(timeout=timeout_s)
        except BaseException:
            _end(process)
            raise
    lines = error.strip().splitlines() or output.strip().splitlines() or ["no output"]
    # torchrun prints more lines after the error of kfac-train.
    own = [line for line in lines if line.startswith("kfac-train: ")]
    return process.returncode, f"{(own or lines)[-1]} (exit code {process.returncode})"


def _end(process: "subprocess.Popen[str]") -> None:
    """Ask the command to end. SIGKILL at once would leave the ranks that torchrun has started."""
    process.terminate()
    try:
        process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _end_with_caller() -> None:
    """Ask the kernel for SIGTERM when the caller dies; between fork and exec of the command."""
    # The library is loaded before the fork: this function must take no lock.
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
