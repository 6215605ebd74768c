"""Where each example of a tar shard lies: a table, made once and kept in the user's cache."""

import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfac_bench.data.base.unreadable import Unreadable

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff")
LABEL = "cls"
LABEL_BYTES = 20
"""A longer label is no number of a class."""

Place = tuple[int, int]
"""Offset and size in bytes."""


@dataclass(frozen=True)
class ShardIndex:
    """The examples of one shard in the order of their images; and what is wrong with the shard."""

    keys: list[str]
    labels: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    faults: list[Unreadable]


def index_of(shard: Path) -> ShardIndex:
    """The index, from the cache if the shard has the size and the time of then.

    A shard with faults is read again each time. Raises OSError where there is no such file.
    """
    stat = shard.stat()
    key = f"{shard.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    cached = _cache() / f"{hashlib.sha256(os.fsencode(key)).hexdigest()}.npz"
    try:
        with np.load(io.BytesIO(cached.read_bytes()), allow_pickle=False) as table:
            return ShardIndex(
                table["keys"].tolist(), table["labels"], table["offsets"], table["sizes"], []
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        index = read_index(shard)
    if not index.faults and index.keys:
        _keep(cached, index)
    return index


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "kfac_bench" / "shards"


def _keep(path: Path, index: ShardIndex) -> None:
    """Whole or not at all, as other ranks may do the same; without it all is only slower."""
    content = io.BytesIO()
    np.savez(
        content,
        keys=np.array(index.keys),
        labels=index.labels,
        offsets=index.offsets,
        sizes=index.sizes,
    )
    own = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own.write_bytes(content.getvalue())
        own.replace(path)
    except OSError:
        with suppress(OSError):
            own.unlink()


def read_index(shard: Path) -> ShardIndex:
    """Read the headers of all members, and the labels; images are not looked at.

    An example is `<key>.jpg` (or jpeg, png) and `<key>.cls`, the number of its class in digits; the
    key ends at the first dot of the file's name, as the webdataset package has it. Other members
    are passed over. Faults: an end that is missing, a second member of one name, one whose name
    leads out of the archive, an image without a label, a label that is none. Raises OSError where
    the file cannot be opened.
    """
    faults: list[Unreadable] = []
    images: dict[str, Place] = {}
    labels: dict[str, Place] = {}
    with shard.open("rb") as file:
        for name, place in _members(shard, file, faults):
            folder, _, base = name.rpartition("/")
            stem, _, kind = base.partition(".")
            key = f"{folder}/{stem}" if folder else stem
            table = images if kind.lower() in IMAGES else labels if kind == LABEL else None
            if table is None:
                continue
            if key in table:
                faults.append(Unreadable(f"{shard}:{name}", "a second one of this name"))
            else:
                table[key] = place
        found: list[tuple[str, int, int, int]] = []
        for key, (offset, size) in images.items():
            if key not in labels:
                faults.append(Unreadable(f"{shard}:{key}", f"there is no {key}.{LABEL}"))
                continue
            label = _label(file, *labels[key])
            if label is None:
                faults.append(Unreadable(f"{shard}:{key}.{LABEL}", "no number of a class"))
                continue
            found.append((key, label, offset, size))
    faults += [
        Unreadable(f"{shard}:{key}.{LABEL}", "there is no image of it")
        for key in labels.keys() - images.keys()
    ]
    labels_of, offsets, sizes = (np.array([x[i] for x in found], np.int64) for i in (1, 2, 3))
    faults.sort(key=lambda fault: fault.path)
    return ShardIndex([x[0] for x in found], labels_of, offsets, sizes, faults)


def _members(shard: Path, file: Any, faults: list[Unreadable]) -> Iterator[tuple[str, Place]]:
    """Name and place of all regular files, whole ones, whose names are inside the archive."""
    end = os.fstat(file.fileno()).st_size
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # thousands, in each shard
                if member.isdir():
                    continue
                what = f"{shard}:{member.name}"
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
                    faults.append(Unreadable(what, "neither a file nor a folder"))
                elif member.name.startswith("/") or ".." in member.name.split("/"):
                    faults.append(Unreadable(what, "a name that leads out of the archive"))
                elif member.offset_data + member.size > end:
                    faults.append(Unreadable(what, "the shard ends within it"))
                else:
                    yield member.name.removeprefix("./"), (member.offset_data, member.size)
            closed = _is_closed(file, tar.offset)
    except Exception as error:  # a damaged header makes tarfile raise many things
        reason = " ".join(str(error).split()) or type(error).__name__
        faults.append(Unreadable(str(shard), f"it is damaged: {reason}"))
        return
    if not closed:
        faults.append(Unreadable(str(shard), "it is damaged: its end is missing"))


def _is_closed(file: Any, offset: int) -> bool:
    """Whether an empty block is there: tarfile takes a bad header, or none, for the end too."""
    file.seek(offset)
    return bool(file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE))


def _label(file: Any, offset: int, size: int) -> int | None:
    if size > LABEL_BYTES:
        return None
    file.seek(offset)
    text = file.read(size).strip()
    return int(text) if text.isdigit() and len(text) < 10 else None
