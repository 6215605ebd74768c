"""Opening the files of a run directory that may come from somebody else.

A directory from an archive or a shared disk may hold links, FIFOs, devices or huge files under the
names of our files. Every reader and writer of run directories opens them here. A link is never
followed, nothing blocks, and no file is cut when it is opened.
"""

import errno
import os
import stat
from pathlib import Path

from kfac_bench.errors import UsageError

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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
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
