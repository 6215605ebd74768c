"""Runs on this machine: in a forked process, or as a command with one process for each rank.

The imports of a short run take longer than the run itself. So a server process imports everything
once (multiprocessing's forkserver). Each forked run is a fork of the server, with the environment
that the caller has at that moment.
"""

import ctypes
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kfac_bench.config import compose, named_variables, problem_file
from kfac_bench.errors import UsageError, one_line
from kfac_bench.output import say

PRELOAD = (
    "kfac_bench.training.run",
    "kfac_bench.distributed",
    "pytorch_optimizer",
)


BEFORE_TRAINING: list[str] = []
"""Modules that a forked run imports first, because they add something to the package."""


def train_forked(overrides: Sequence[str]) -> tuple[int, str]:
    """Train with the overrides; return the exit code of ``kfac-train`` and its last line.

    A code below 0 is the number of the signal that killed the process. A problem file that
    the user's command line has named runs again in the process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        named = (problem_file.paths(), named_variables.allowed())
        arguments = (list(overrides), str(output), {**os.environ}, *named, BEFORE_TRAINING)
        process = context.Process(target=_train_in_fork, args=arguments)
        try:
            process.start()
        except (OSError, EOFError) as error:
            return 1, f"the server that starts runs cannot be reached ({one_line(error)})"
        process.join()
        lines = output.read_text(errors="replace").strip().splitlines() if output.exists() else []
    assert process.exitcode is not None
    return process.exitcode, lines[-1] if lines else "no output"


def _train_in_fork(
    overrides: list[str],
    output: str,
    environment: dict[str, str],
    problems: list[str],
    variables: list[str],
    modules: list[str],
) -> None:
    """Train in the fork, with standard output and standard error in the file ``output``."""
    os.environ.clear()
    os.environ.update(environment)
    # Data loaders start their workers by fork, as in a process that was not forked itself.
    multiprocessing.set_start_method("fork", force=True)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    _end_fork_with_caller()
    from kfac_bench.training import run  # Only the server imports torch, not the caller.

    try:
        for module in modules:
            importlib.import_module(module)
        named_variables.allow(variables)
        for path in problems:
            problem_file.run_named([f"{problem_file.WORD}{path}"])
        code = run.start(compose.load(overrides))
    except UsageError as error:
        say(str(error))
        code = 2
    sys.exit(code)


def _end_fork_with_caller() -> None:
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


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
"""The number of this request in linux/prctl.h."""
END_S = 60
"""Seconds that a command may take to save and to end after SIGTERM."""


def local_command(overrides: Sequence[str], ranks: int) -> list[str]:
    """Return the command that trains on so many ranks of this machine."""
    program = ["kfac_bench.benchmark.local_runs", str(ranks)] if ranks > 1 else ["kfac_bench"]
    # The settings are those of the table, and no recipe that follows from data and model.
    return [sys.executable, "-m", *program, "recipe=none", *overrides]


def run_command(command: Sequence[str]) -> tuple[int, str]:
    """Run the command; return its exit code and the line that names the error.

    On Linux the command gets SIGTERM if this process dies. torchrun passes the signal on to its
    ranks, which save and end.

    If this process stops waiting, for example at Ctrl-C, the command gets SIGTERM first.
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
            output, error = process.communicate()
        except BaseException:
            _end_command(process)
            raise
    lines = error.strip().splitlines() or output.strip().splitlines() or ["no output"]
    # torchrun prints more lines after the error of kfac-train.
    own = [line for line in lines if line.startswith("kfac-train: ")]
    return process.returncode, f"{(own or lines)[-1]} (exit code {process.returncode})"


def _end_command(process: "subprocess.Popen[str]") -> None:
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


def start_ranks(arguments: list[str]) -> None:
    """Start `kfac-train` on several ranks: `python -m kfac_bench.benchmark.local_runs N ...`.

    torchrun starts and watches the ranks. By itself it listens on all addresses of the machine.
    Here it keeps its own store in a private file, and the ranks meet at the loopback address.

    Args:
        arguments: The number of ranks, and the overrides of kfac-train.
    """
    # Otherwise torchrun opens a store for the ranks, which listens on all addresses.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    ranks, *overrides = arguments
    with tempfile.TemporaryDirectory(prefix="kfac-ranks-") as folder:
        own = ["--nnodes=1", f"--nproc-per-node={ranks}", "--local-addr=127.0.0.1"]
        own += ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]
        own += [f"--rdzv-endpoint={Path(folder, 'store')}"]
        sys.argv = ["torchrun", *own, "-m", "kfac_bench", *overrides]
        runpy.run_module("torch.distributed.run", run_name="__main__")


_BUSY = 0.3
"""Share of the cores that may have been in use before a warning is due."""


def warn_if_busy(say: Callable[[str], None]) -> None:
    """Print one line if the machine was busy in the last minute."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > _BUSY * cores:
        busy = f"load {load:.1f}, {cores} cores"
        say(f"the machine was busy in the last minute, so times may be too long: {busy}")


if __name__ == "__main__":
    start_ranks(sys.argv[1:])
