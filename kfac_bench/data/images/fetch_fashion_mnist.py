"""``kfac-data fetch fashion_mnist``: the four files, copied from Debian's package or downloaded.

A file gets its final name only after its unpacked content has the expected SHA-256. The hashes are
those of the unpacked files, because gzip files of the same content differ.
"""

import fcntl
import gzip
import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kfac_bench.data.download import check_url, download
from kfac_bench.data.images import fashion_mnist
from kfac_bench.errors import UsageError

URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
"""Address that the authors of Fashion-MNIST publish. It has no https."""
CONTENT = {
    "train-images-idx3-ubyte": (
        47_040_016,
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    "train-labels-idx1-ubyte": (
        60_008,
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    "t10k-images-idx3-ubyte": (
        7_840_016,
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    "t10k-labels-idx1-ubyte": (
        10_008,
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
}
"""Bytes and SHA-256 of each file, unpacked. The files that the authors publish with MD5 sums and
those of Debian's package both have this content (compared on 2026-11-23)."""
OTHER_WAYS = "Use another --url, or install Debian's package dataset-fashion-mnist"


def fetch(root: Path, url: str | None, say: Callable[[str], None]) -> None:
    """Put the four files into `root`.

    Args:
        root: The folder, which is made if it does not exist. Complete files in it are kept.
        url: Address of a folder with the four .gz files; None: Debian's package if it is installed,
            else the address of the authors.
        say: Prints a line for each file.

    Raises:
        UsageError: A file cannot be had, `root` cannot be written, or it has other files under
            these names.
    """
    if url is not None:
        check_url(url)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root, say):
            for name in CONTENT:
                say(f"{name}: {_fetch_file(name, root, url)}")
    except OSError as error:
        raise UsageError(f"{root}: cannot be written ({error.strerror or error})") from None


@contextmanager
def _alone(root: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder's lock inside the block: two commands would write the same partial files."""
    folder = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{root}: waits for another kfac-data fetch that writes there")
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError:
            pass  # Some network file systems have no locks.
        yield
    finally:
        os.close(folder)


def _fetch_file(name: str, root: Path, url: str | None) -> str:
    """Get one file, and return where it is from, in words."""
    final = fashion_mnist.path_of(root, name)
    if final.exists():
        if not _is_right(final, name):
            raise UsageError(
                f"{final}: is not the published file. Remove it, or choose another folder"
            )
        return "was there already"
    installed = fashion_mnist.path_of(fashion_mnist.DEBIAN, name)
    if url is None and installed.is_file() and _is_right(installed, name):
        partial = root / f".{installed.name}.partial"
        shutil.copyfile(installed, partial)
        _finish(partial, root / installed.name)
        return f"copied from {installed}"
    address = f"{(url or URL).rstrip('/')}/{name}.gz"
    partial = root / f".{name}.gz.partial"
    # The beginning may be from another server, so a bad whole is downloaded once more.
    is_right = partial.exists() and _download(address, partial, name)
    if not is_right and not _download(address, partial, name):
        raise UsageError(
            f"{address}: is not the published file, its SHA-256 is wrong. {OTHER_WAYS}"
        )
    _finish(partial, root / f"{name}.gz")
    return f"downloaded from {address}"


def _download(address: str, partial: Path, name: str) -> bool:
    """Return whether the file is the published one. If not, it is removed."""
    try:
        # gzip makes a file without any pattern a little larger.
        download(address, partial, most_bytes=CONTENT[name][0] + 1024)
    except UsageError as error:
        raise UsageError(f"{error}. {OTHER_WAYS}") from None
    if _is_right(partial, name):
        return True
    partial.unlink()
    return False


def _is_right(path: Path, name: str) -> bool:
    """Return whether a plain or packed file has the published content."""
    size, expected = CONTENT[name]
    is_packed = path.suffix == ".gz" or path.name.endswith(".gz.partial")
    try:
        with gzip.open(path, "rb") if is_packed else path.open("rb") as file:
            # One byte more than expected shows a file that is too long, and ends a gzip bomb.
            content = file.read(size + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return False
    return hashlib.sha256(content).hexdigest() == expected


def _finish(partial: Path, final: Path) -> None:
    """Give a complete file its name. A power cut leaves the whole file or none."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(final)
