"""The files of a run directory, which may come from somebody else, and the lock of the directory.

A directory from an archive or a shared disk may hold links, FIFOs, devices or huge files under the
names of our files. Every reader and writer of run directories opens them here. A link is never
followed, nothing blocks, and no file is cut when it is opened. One process at a time may write in
a run directory: it holds the lock.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kfac_bench.errors import UsageError
from kfac_bench.whole_files import whole_file

MOST_TEXT_BYTES = 16 << 20
"""Limit of a small file, such as a manifest: real ones have some kilobytes."""


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of the regular file at `path`, which child processes do not inherit.

    Raises:
        UsageError: The path is a link or no regular file.
        OSError: The file is missing or cannot be opened.
    """
    refuse_special(path)
    # The path may change between the check and this call, so the flags and fstat() check again.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(path, "a link") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _refused(path, _kind(mode))
    return descriptor


def read_own(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> bytes:
    """Return the content of the regular file at `path`.

    Raises:
        UsageError: The path is a link or no regular file, or the file has more than `most_bytes`.
        OSError: The file is missing or cannot be read.
    """
    with open(open_own(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > most_bytes else file.read(most_bytes + 1)
        if size > most_bytes or len(content) > most_bytes:
            size = max(size, len(content))
            raise UsageError(
                f"{path}: has {size:,} bytes, and the limit is {most_bytes:,}. "
                "Remove the file, or take it from a backup"
            )
    return content


def refuse_special(path: Path, *, folder: bool = False) -> None:
    """Raise `UsageError` if `path` exists and is no regular file (with `folder`: no folder)."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISDIR(mode) if folder else stat.S_ISREG(mode)):
        raise _refused(path, _kind(mode))


def refuse_links(directory: Path) -> None:
    """Raise `UsageError` if an entry of a run directory is a link, FIFO, device or socket.

    A run writes into folders and replaces files there. Through a link it would write elsewhere.
    """
    for path in sorted(directory.iterdir()):
        mode = os.lstat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise _refused(path, _kind(mode))


def write_own(path: Path, content: bytes) -> None:
    """Write the file as a whole, so that a power cut leaves the old file or the new one.

    Raises:
        OSError: The file cannot be written. The old file is untouched.
    """
    with whole_file(path) as temporary, temporary.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in the folder are on the disk, if its file system can sync folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and shared file systems sync files alone. That must not end a run.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _kind(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "a link"
    if stat.S_ISFIFO(mode):
        return "a FIFO"
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a regular file" if stat.S_ISREG(mode) else "a device or socket"


def _refused(path: Path, kind: str) -> UsageError:
    return UsageError(
        f"{path}: is {kind}, which is never used in a run directory. Remove it, or put a copy of "
        "the real file or folder there"
    )


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


def is_locked(directory: Path) -> bool:
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
