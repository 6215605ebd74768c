"""The lock of a run directory: one process at a time writes there."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kfac_bench.errors import UsageError
from kfac_bench.record.own_files import open_own

LOCK_FILE = ".lock"
POLL_S = 0.1

_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


def _forget() -> None:
    """Close the locks in a forked process: a lock lives as long as any process has it open."""
    while _held:
        with suppress(OSError):
            os.close(_held.pop())


# Loader workers are forks. Without this they would keep the lock of a run that was killed.
os.register_at_fork(after_in_child=_forget)


@contextmanager
def locked(directory: Path, patience_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Make the run directory if it is missing, and hold its lock inside the block.

    Args:
        directory: The run directory.
        patience_s: How long to wait for another process that holds the lock.
        say: Prints the line that the process waits.

    Raises:
        UsageError: Another process holds the lock, or the directory cannot be written.
    """
    deadline, is_told = time.monotonic() + patience_s, False
    while (descriptor := _try(directory)) is None:
        if time.monotonic() >= deadline:
            raise UsageError(
                f"{directory}: another process is running it. Wait until that process ends or stop "
                "it, then give the same command again. For a second run set another run_id=NAME"
            )
        if not is_told:
            say(f"{directory}: another process still runs it; waits up to {patience_s:.0f} s")
            is_told = True
        time.sleep(POLL_S)
    _held.add(descriptor)
    owner = os.getpid()
    try:
        yield
    finally:
        # A fork that leaves the block has closed the descriptor before.
        if os.getpid() == owner:
            _held.discard(descriptor)
            os.close(descriptor)


def is_held(directory: Path) -> bool:
    """Return whether a process holds the lock of the run directory.

    Raises:
        UsageError: The lock is a link or no regular file.
    """
    try:
        descriptor = open_own(directory / LOCK_FILE)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _try(directory: Path) -> int | None:
    """Return the descriptor of the lock if it is free."""
    path = directory / LOCK_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise UsageError(f"{directory}: cannot write here ({error.strerror})") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise UsageError(
            f"{path}: cannot be locked ({error.strerror}). Set runs_dir to a file system with "
            "locks, or mount this one with locks"
        ) from None
    try:
        # The holder may have removed the directory at its end: this file is gone then.
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
