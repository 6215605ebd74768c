"""The environment of a run: versions, hardware, memory and processor cores.

A result depends on it beside the configuration, so `run.json` and the first event record it.
"""

import ctypes
import os
import platform
import resource
import subprocess
import sys
import threading
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kfac_bench.distributed.slurm_rank import from_launcher

PACKAGES = ("torch", "torchvision", "hydra-core", "wandb", "numpy", "scikit-learn")


def describe() -> dict[str, Any]:
    """Return code version, package versions, hardware and command as plain strings and numbers."""
    import kfac_bench

    versions = {"kfac_bench": kfac_bench.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "git_commit": _git_commit(),
        "versions": versions,
        "hardware": _hardware(),
        "command": " ".join(sys.argv),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID", ""),
    }


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory, and return whether glibc is there and agreed.

    By default glibc returns freed memory to the system, and each new use costs page faults. A K-FAC
    step on a CPU frees and takes tens of megabytes (docs/lab/what_was_tried.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    trim_threshold, mmap_threshold = -1, -3
    return bool(mallopt(trim_threshold, 1 << 30) and mallopt(mmap_threshold, 1 << 30))


def try_threads(count: int) -> None:
    """Start so many threads at once, and end them.

    If the threads of OpenMP cannot start, its library ends the process without a clear line.

    Raises:
        RuntimeError: If a limit does not allow so many threads.
    """
    may_end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=may_end.wait, daemon=True)
            thread.start()
            started.append(thread)
    finally:
        may_end.set()
        for thread in started:
            thread.join()


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory: allocated by torch on a GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts ru_maxrss in kilobytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def pin(threads: int) -> bool:
    """Keep this process and its later threads on `threads` cores that no other rank has.

    The launcher's local rank chooses the cores. Nothing changes if the cores do not suffice for all
    ranks of the node, or if a launcher such as srun has pinned the ranks before.

    Returns:
        Whether this process has cores of its own now.
    """
    rank = int(from_launcher("LOCAL_RANK", "0"))
    ranks = int(from_launcher("LOCAL_WORLD_SIZE", "1"))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks * threads:
        return False
    os.sched_setaffinity(0, cores[rank * threads : (rank + 1) * threads])
    return True


def _hardware() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": ", ".join(gpus) or "none",
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def cpu_name() -> str:
    """Return the name of the processor, or of its architecture if the system does not tell it."""
    unnamed = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return unnamed
    names = (x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    return next(names, unnamed)


@cache
def _git_commit() -> str:
    """Return the commit of the checkout that holds this package, or an empty string.

    `+changes` follows the commit if files differ from it. A process asks git once: its code stays
    as it is.
    """
    here = Path(__file__).parents[1]
    git = ["git", "-C", str(here)]
    try:
        top = _run([*git, "rev-parse", "--show-toplevel"])
        # The package may be installed inside another project's repository.
        if Path(top) != here.parent:
            return ""
        commit = _run([*git, "rev-parse", "HEAD"])
        return commit + ("+changes" if _run([*git, "status", "--porcelain", "-uno"]) else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)  # noqa: S603
    return done.stdout.strip()
