"""Samples of a launcher's ranks, and of the processes that the ranks start, from /proc."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Sample:
    """One process at one moment. Processes of a rank with the same name are added up."""

    step: int
    """The number of updates done, from the event file."""
    process: str
    """Name of the process: `rank 1`, or `rank 0's wandb-core`."""
    resident_mb: float
    open_files: float
    threads: float


def sample(launcher: int, step: int) -> list[Sample]:
    """Sample all ranks that the process `launcher` started, and all their descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (parent := _field(entry, "PPid")):
            children[int(parent)].append(int(entry.name))
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for pid in children[launcher]:
        if (rank := _rank(pid)) is None:
            continue
        _add(total[f"rank {rank}"], pid)
        for below in _descendants(pid, children):
            _add(total[f"rank {rank}'s {_field(PROC / str(below), 'Name')}"], below)
    return [Sample(step, name, *values) for name, values in total.items() if values[0]]


def _descendants(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    for child in children[pid]:
        yield child
        yield from _descendants(child, children)


def _add(values: list[float], pid: int) -> None:
    process = PROC / str(pid)
    resident_kb, threads = (_field(process, key) for key in ("VmRSS", "Threads"))
    # The process may end in the meantime.
    with suppress(OSError):
        files = len(os.listdir(process / "fd"))
        for i, value in enumerate((float(resident_kb or 0) * 1024 / 1e6, files, threads or 0)):
            values[i] += float(value)


def _rank(pid: int) -> str | None:
    """Return the rank of a process, from the variable that torchrun sets."""
    try:
        variables = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    match = re.search(rb"(?:^|\0)RANK=(\d+)\0", variables)
    return match and match[1].decode()


def _field(process: Path, key: str) -> str | None:
    """Return a field of /proc/PID/status without its unit."""
    try:
        status = (process / "status").read_text(errors="replace")
    except OSError:
        return None
    match = re.search(rf"^{key}:\s+(\S+)", status, re.MULTILINE)
    return match and match[1]
