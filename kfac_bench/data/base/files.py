"""Files of datasets, which may be damaged, missing or hostile.

A file must be regular, because reading a FIFO or a device could last forever. What a compressed
file unpacks to is limited, because a few kilobytes of a hostile archive unpack to terabytes. Files
and examples that cannot be read stop the run, or are left out and reported.
"""

import errno
import fcntl
import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kfac_bench.errors import UsageError, one_line
from kfac_bench.output import counted


def regular(path: Path) -> Path:
    """Return the path, if it is a regular file or a link to one, or if nothing is there.

    Raises:
        OSError: It is a FIFO, a device or a socket.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path


def files_below(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, sorted by their folder and then by their name.

    Links to folders are followed, unless the folder has been seen: a link could lead back.

    Raises:
        UsageError: A folder cannot be listed. Without its files the dataset would be another one.
    """
    seen: set[str] = set()
    found = []
    for place, names, files in os.walk(folder, onerror=_refuse_folder, followlinks=True):
        seen.add(os.path.realpath(place))
        # Sorted, because the order decides which of two links to one folder is followed.
        inner = [name for name in names if not _leads_back(os.path.join(place, name), seen)]
        names[:] = sorted(inner)
        found.append((place, sorted(files)))
    return [os.path.join(place, file) for place, files in sorted(found) for file in files]


def _refuse_folder(error: OSError) -> None:
    raise UsageError(f"{error.filename}: the folder cannot be read ({error.strerror})") from None


def _leads_back(path: str, seen: set[str]) -> bool:
    return os.path.islink(path) and os.path.realpath(path) in seen


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache, which may not exist yet."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return home / "kfac_bench" / name


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Make the folder, and let one process of this machine at a time into the block.

    So ranks do not make the same file of a cache at once. A network file system may have no locks.
    Then all enter.

    Raises:
        OSError: The folder cannot be made or read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def made_once(final: Path, make: Callable[[Path], None], what: str) -> None:
    """Make a folder in the user's cache, if it is not there.

    Args:
        final: The folder.
        make: Writes the content into a folder that does not exist yet.
        what: What needs the folder, for the message of an error.

    Raises:
        UsageError: The cache cannot be written.
    """
    try:
        if final.is_dir():
            return
        with one_at_a_time(final.parent):
            if final.is_dir():  # another rank was faster
                return
            with tempfile.TemporaryDirectory(dir=final.parent, prefix=f"{final.name}-") as scratch:
                make(Path(scratch) / "made")
                _move(Path(scratch) / "made", final)
    except OSError as error:
        raise UsageError(f"{what}: {final} cannot be written ({error.strerror})") from None


def _move(made: Path, final: Path) -> None:
    """Move a complete folder into place, unless a rank on another machine was faster."""
    try:
        made.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(made)


class Unpacked(io.RawIOBase):
    """The unpacked content of a file, as a stream that ends with an error beyond a limit."""

    def __init__(self, packed: io.BufferedIOBase, most: int, why: str) -> None:
        """Wrap a stream that unpacks.

        Args:
            packed: The stream, such as that of `gzip.open`. Closing this object closes it too.
            most: Most bytes that may be read.
            why: The end of the error message, for example how large the file may be.
        """
        self._packed, self._most, self._why = packed, most, why
        self._count = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill a part of the buffer; see `io.RawIOBase`.

        Raises:
            OSError: The limit is exceeded.
        """
        content = self._packed.read(min(len(buffer), 1 << 20))
        self._count += len(content)
        if self._count > self._most:
            raise OSError(f"it unpacks to more than {self._most} bytes, {self._why}")
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        """Close the stream that unpacks, too."""
        self._packed.close()
        super().close()


KINDS = 3
"""Kinds of faults that an error lists."""


@dataclass(frozen=True)
class Unreadable:
    """A file, or a part of one, that cannot be used, and the reason.

    Loader workers return this object instead of an exception, because an exception from a worker
    arrives with a traceback in its message.
    """

    path: str
    """The file; for a part of a file followed by a colon and the name of the part."""
    reason: str

    @classmethod
    def because(cls, path: object, error: Exception) -> "Unreadable":
        """Return the fault that an exception describes, with its message on one line."""
        return cls(str(path), one_line(error))


def summary(faults: Sequence[Unreadable]) -> str:
    """Return the most frequent kinds of faults, each with its count and its first place.

    Faults are of one kind if their reasons differ only in numbers and quoted words.
    """
    kinds: dict[str, list[Unreadable]] = {}
    for fault in faults:
        kind = re.sub(r"'[^']*'|-?\d+(\.\d+)?", "", fault.reason)
        kinds.setdefault(kind, []).append(fault)
    frequent = sorted(kinds.values(), key=len, reverse=True)[:KINDS]
    return "; ".join(
        f"{first.path}: {first.reason}" + (f" (and {len(others)} more like this)" if others else "")
        for first, *others in frequent
    )


def left_out(faults: Sequence[Unreadable]) -> str:
    """Return a sentence about faults that emptied a dataset, or nothing."""
    return f". Left out: {summary(faults)}" if faults else ""


@dataclass
class Faults:
    """The unreadable files of one dataset, each listed once.

    With `skip` the run goes on, and batches lack the examples that cannot be read. Without it the
    first unreadable file is an error.
    """

    skip: bool = False
    can_skip: bool = True
    """Whether the dataset has the option `data.on_error`."""
    new: list[Unreadable] = field(default_factory=list)
    """Faults found since the last call of `take`."""
    left_out: int = 0
    """Number of times that an example was left out."""
    _known: set[str] = field(default_factory=set)
    """Paths of all faults found so far."""

    def add(self, fault: Unreadable) -> None:
        """Record a fault. Without `skip`, raise UsageError with the name of the file."""
        if not self.skip:
            other = ", or leave bad files out with data.on_error=skip" if self.can_skip else ""
            raise UsageError(
                f"{fault.path} cannot be read: {fault.reason}. Repair the file and continue with "
                f"data.changed=accept{other}"
            )
        self.left_out += 1
        if fault.path not in self._known:
            self._known.add(fault.path)
            self.new.append(fault)

    def add_all(self, root: object, faults: list[Unreadable]) -> None:
        """Record the faults found before training in the dataset at `root`.

        Without `skip`, raise UsageError with the most frequent kinds of faults.
        """
        if faults and not self.skip:
            raise UsageError(
                f"{counted(len(faults), 'bad file or entry', plural='bad files or entries')} in "
                f"{root}: {summary(faults)}. Repair or remove them, or set data.on_error=skip to "
                "leave them out"
            )
        for fault in faults:
            self.add(fault)

    def take(self) -> list[Unreadable]:
        """Return the faults found since the last call and mark them as reported."""
        taken, self.new = self.new, []
        return taken
