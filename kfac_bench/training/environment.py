"""What a result depends on beside the configuration: code, versions, hardware."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "torchvision", "hydra-core", "wandb", "numpy", "scikit-learn")


def describe() -> dict[str, Any]:
    """Plain strings and numbers, for ``run.json`` and the first event."""
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
    """Tell glibc to keep what is freed instead of handing it back and faulting it in anew.

    A K-FAC step on a CPU frees and takes tens of megabytes (docs/performance.md). Returns whether
    there is a glibc that took it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    return bool(mallopt(trim_threshold, 1 << 30) and mallopt(mmap_threshold, 1 << 30))


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has held: allocated on a GPU by torch, on a CPU resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux


def pin(threads: int) -> bool:
    """Keep this process, and threads that it starts, to ``threads`` cores that no other rank has.

    By the launcher's local rank. Whether there were enough cores for all ranks of the node; if not,
    or if somebody else (srun) has pinned the ranks, nothing is changed.
    """
    rank, ranks = (
        int(os.environ.get(f"HOROVOD_{horovodrun}") or os.environ.get(torchrun) or alone)
        for horovodrun, torchrun, alone in (
            ("LOCAL_RANK", "LOCAL_RANK", 0),
            ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", 1),
        )
    )
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks * threads:
        return False
    os.sched_setaffinity(0, cores[rank * threads : (rank + 1) * threads])
    return True


def _hardware() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": ", ".join(gpus) or "none",
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    return next(names, platform.processor())


def _git_commit() -> str:
    """Commit of the checkout the package lies in, ``+changes`` if it differs; empty if none."""
    here = Path(__file__).parents[1]
    git = ["git", "-C", str(here)]
    try:
        top = _run([*git, "rev-parse", "--show-toplevel"])
        if Path(top) != here.parent:  # installed into somebody else's repository
            return ""
        commit = _run([*git, "rev-parse", "HEAD"])
        return commit + ("+changes" if _run([*git, "status", "--porcelain", "-uno"]) else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)  # noqa: S603
    return done.stdout.strip()
