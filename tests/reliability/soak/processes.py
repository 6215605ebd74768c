"""Samples of a run's ranks, of the processes that the ranks start, and of the run directory."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """One measured value at one moment. Processes of a rank with the same name are added up."""

    step: int
    """The number of updates done, from the event file."""
    subject: str
    """What was measured: `rank 1`, `rank 0's wandb-core` or `disk`."""
    metric: str
    """`resident MB`, `open files`, `threads` or `CPU s` of a process; `checkpoints MB` or
    `records MB` of the disk."""
    value: float


def sample(launcher: int, step: int) -> list[Sample]:
    """Sample all ranks that the process `launcher` started, and all their descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (parent := _field(entry, "PPid")):
            children[int(parent)].append(int(entry.name))
    total: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for pid in children[launcher]:
        if (rank := _rank(pid)) is None:
            continue
        _add(total[f"rank {rank}"], _metrics(pid))
        for below in _descendants(pid, children):
            name = _field(PROC / str(below), "Name")
            _add(total[f"rank {rank}'s {name}"], _metrics(below))
    return [
        Sample(step, subject, metric, value)
        for subject, metrics in total.items()
        for metric, value in metrics.items()
    ]


def sample_disk(run: Path, step: int) -> list[Sample]:
    """Sample the size of the checkpoints in a run directory, and of all other files."""
    size = {"checkpoints MB": 0.0, "records MB": 0.0}
    for folder, _, files in os.walk(run):
        is_checkpoint = "checkpoints" in Path(folder).relative_to(run).parts[:1]
        for name in files:
            # The run removes old checkpoints in the meantime.
            with suppress(OSError):
                mb = os.lstat(os.path.join(folder, name)).st_size / 1e6
                size["checkpoints MB" if is_checkpoint else "records MB"] += mb
    return [Sample(step, "disk", metric, mb) for metric, mb in size.items()]


def _descendants(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    for child in children[pid]:
        yield child
        yield from _descendants(child, children)


def _add(total: dict[str, float], metrics: Mapping[str, float]) -> None:
    for metric, value in metrics.items():
        total[metric] += value


def _metrics(pid: int) -> dict[str, float]:
    """Return the metrics of a process; an empty dictionary if it has ended."""
    process = PROC / str(pid)
    try:
        files = len(os.listdir(process / "fd"))
        # The name, in brackets, may contain blanks. utime and stime are the fields 14 and 15.
        times = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[11:13]
    except OSError:
        return {}
    resident_kb, threads = (_field(process, key) for key in ("VmRSS", "Threads"))
    if resident_kb is None or threads is None:
        return {}
    return {
        "resident MB": int(resident_kb) * 1024 / 1e6,
        "open files": files,
        "threads": int(threads),
        "CPU s": sum(map(int, times)) / TICKS_PER_S,
    }


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
