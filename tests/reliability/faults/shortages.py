"""Shortages: a disk, memory, threads or names of files run out."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from kfac_bench.training.trainer import Trainer
from tests.reliability.faults.hooks import at, each_step, happens

LITTLE_BYTES = 60_000
"""Room for the event file, but not for a checkpoint."""


FILLER = "filler"


def fill(path: Path, leave: int) -> None:
    """Write a file that fills the disk except for `leave` bytes."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"\0" * 4096):
            pass
    with path.open("r+b") as file:
        file.truncate(max(0, path.stat().st_size - leave))


def fill_disk(leave: int, *, is_visible: bool = True) -> Callable[[int], None]:
    """Return a function that installs a full disk with `leave` free bytes.

    With `is_visible=False` the disk claims to have room, like a quota: only a write fails.
    """

    def install(step: int) -> None:
        def action(trainer: Trainer, now: int) -> None:
            if now == step:
                happens()
                fill(trainer.directory.parent / FILLER, leave)

        each_step(action)
        if not is_visible:
            usage = shutil.disk_usage
            shutil.disk_usage = lambda path: usage(path)._replace(free=1 << 40)

    return install


SPARE_BYTES = 64 << 20


STACK_BYTES = 4 * SPARE_BYTES


def _limit_memory() -> None:
    """Leave this process little new memory, as `ulimit -v` does."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, resource.RLIM_INFINITY))


def no_memory(step: int) -> None:
    def action(_: Trainer) -> None:
        _limit_memory()
        torch.zeros(4 * SPARE_BYTES)

    at(step, action)


def no_threads(step: int) -> None:
    """Refuse new threads: the limit leaves no memory for their stacks."""

    def action(_: Trainer) -> None:
        threading.stack_size(STACK_BYTES)
        _limit_memory()

    at(step, action)


INODES = 200
"""Names for which a small disk has room. A run needs fewer."""


def empty_files(folder: Path) -> None:
    """Make empty files until the disk has no room for another name."""
    folder.mkdir()
    with suppress(OSError):
        for number in range(1_000_000):
            (folder / str(number)).touch()


def no_inodes(step: int) -> None:
    at(step, lambda trainer: empty_files(trainer.directory.parent / FILLER))


def no_shared_memory(step: int) -> None:
    """Give this process and its workers a /dev/shm of its own that has no room."""

    def action(_: Trainer) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEW_MOUNTS):
            raise OSError(ctypes.get_errno(), "unshare")
        # Without this the mount would reach all processes of the machine.
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "kfac", "/dev/shm"], check=True)
        fill(Path("/dev/shm") / FILLER, 0)

    at(step, action)


NEW_MOUNTS = 0x20000
"""CLONE_NEWNS of unshare(2)."""


def few_files(step: int) -> None:
    """Open files until the limit allows one more, as with a small `ulimit -n`."""

    def action(_: Trainer) -> None:
        most = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, limit))
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        os.close(held.pop())

    held: list[int] = []
    at(step, action)
