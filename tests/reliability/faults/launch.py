"""Launching: start, watch and end the real ranks of a run, by hand like srun, or with torchrun.

Ranks that are started by hand are forks of a process that has imported everything. They do what
real ranks do, but their times lack the time of the imports.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import set_start_method
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from kfac_bench.cli import entry
from tests.support import forks
from tests.support.forks import own_port

ENDS_S = 120.0
"""Time for the ranks of a short run to end by themselves."""


@dataclass
class Ended:
    """How the ranks ended, and what they printed."""

    codes: list[int | None]
    """Exit codes by rank. -9 means killed by SIGKILL, None means hung and then killed."""
    out: str
    errors: str
    seconds: float
    """Time from the start to the first new step."""


def by_hand(
    folder: Path,
    ranks: int,
    options: Sequence[str],
    injected: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    events: Path | None = None,
    meanwhile: Callable[[list[int]], None] = lambda pids: None,
    is_slow: bool = True,
) -> Ended:
    """Start ranks and wait for them. `meanwhile` gets their process ids.

    If `is_slow`, a step takes a little time, so that a fault can meet the run.

    If a rank hangs after the others have ended, it is killed, as a launcher would do.
    """
    began, size = time.monotonic(), size_of(events)
    processes: list[BaseProcess] = []
    with own_port() as port:
        world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        alone = {"RANK": "0", "LOCAL_RANK": "0"}
        for rank in range(ranks):
            who = world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else alone
            who |= dict(environment or {})
            process = forks.server().Process(
                target=_rank, args=(folder, rank, who, dict(injected or {}), [*options], is_slow)
            )
            process.start()
            processes.append(process)
        meanwhile([p.pid or 0 for p in processes])
        first_step = _watch(processes, events, size, began)
        codes = [_end(p) for p in processes]
    out, errors = (
        "".join(
            path.read_text() for rank in range(ranks) if (path := folder / f"{what}{rank}").exists()
        )
        for what in ("out", "err")
    )
    return Ended(codes, out, errors, first_step)


def _rank(
    folder: Path,
    rank: int,
    environment: dict[str, str],
    injected: dict[str, Any],
    options: list[str],
    is_slow: bool,
) -> None:
    """Run a rank in a fork, with an output and an environment of its own."""
    from tests.reliability.faults import inject

    os.environ.update(environment)
    os.setpgid(0, 0)
    # No launcher ends the other ranks when one ends, so they need not wait for rank 0 to speak.
    entry.RANK_0_SPEAKS_S = 0
    # A fork of the server would start its own children through the server too. Real ranks fork.
    set_start_method("fork", force=True)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    inject.main(injected, options, is_slow)


def _watch(processes: Sequence[BaseProcess], events: Path | None, size: int, began: float) -> float:
    """Wait until all have ended or one hangs, and return the seconds to the first new step."""
    first, deadline, ended = 0.0, began + ENDS_S, None
    while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
        if not first and events is not None and stepped(events, size):
            first = time.monotonic() - began
        if ended is None and any(not p.is_alive() for p in processes):
            # A launcher gives the other ranks some time too.
            ended = time.monotonic()
            deadline = min(deadline, ended + 20)
        time.sleep(0.005)
    return first or time.monotonic() - began


def _end(process: BaseProcess) -> int | None:
    if process.is_alive():
        process.kill()
        process.join()
        return None
    process.join()
    return process.exitcode


def size_of(path: Path | None) -> int:
    """Return the bytes of a file, or 0 if it does not exist."""
    return path.stat().st_size if path is not None and path.exists() else 0


def stepped(events: Path, size: int) -> bool:
    """Return whether the event file has a start and a step after its first `size` bytes."""
    with suppress(OSError), events.open("rb") as file:
        file.seek(size)
        return bool(
            re.search(rb'"event": "(Resumed|RunStarted)".*"event": "Trained"', file.read(), re.S)
        )
    return False


def seconds_to_a_new_step(events: Path, size: int) -> float:
    """Wait for the first new step of ranks that torchrun restarts, and return the seconds."""
    began = time.monotonic()
    while not stepped(events, size) and time.monotonic() < began + ENDS_S:
        time.sleep(0.005)
    return time.monotonic() - began


def torchrun(
    folder: Path,
    ranks: int,
    options: Sequence[str],
    meanwhile: Callable[[int], float],
    injected: Mapping[str, Any] | None = None,
    flags: Sequence[str] = (),
) -> Ended:
    """Start ranks with a real torchrun. `meanwhile` gets its process id and returns seconds.

    The output is that of the ranks only, because torchrun prints tracebacks of its own.
    """
    logs = folder / "torchrun"
    with (folder / "agent").open("w") as said, own_port() as port:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        command += [f"--master-port={port}", f"--log-dir={logs}", "--redirects=3", *flags]
        command += ["-m", "tests.reliability.faults.inject", json.dumps(dict(injected or {}))]
        command += options
        agent = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            seconds = meanwhile(agent.pid)
            code: int | None = agent.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            agent.kill()
            agent.wait()
    out, errors = (
        "".join(path.read_text() for path in sorted(logs.glob(f"**/{name}")))
        for name in ("stdout.log", "stderr.log")
    )
    return Ended([code], out, errors, seconds)
