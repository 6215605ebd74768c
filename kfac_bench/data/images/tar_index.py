"""The index of a tar shard: where each example is in the file.

Reading the headers of a shard takes time, so the index is kept in the user's cache.
"""

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
from kfac_bench.data.images.opening import KINDS
from kfac_bench.data.regular_file import regular
from kfac_bench.whole_files import whole_file

LABEL = "cls"
KEY_LENGTH = 1000
"""The index of a shard with a longer key is not kept in the cache."""
LABEL_BYTES = 20
"""Maximum length of a label. A longer file is not a class number."""

ByteRange = tuple[int, int]
"""Offset and size in bytes."""


@dataclass(frozen=True)
class ShardIndex:
    """The examples of one shard, in the order of their images, and the faults of the shard."""

    keys: list[str]
    labels: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    faults: list[Unreadable]


def index_of(shard: Path) -> ShardIndex:
    """Return the index of a shard, from the cache if the shard has not changed.

    A shard has changed if its size or modification time differs. A shard with faults, or with a
    key of more than KEY_LENGTH characters, is not cached.

    Raises:
        OSError: The file does not exist or cannot be opened.
    """
    stat = regular(shard).stat()
    key = f"{shard.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    cached = _cache() / f"{hashlib.sha256(os.fsencode(key)).hexdigest()}.npz"
    try:
        with np.load(io.BytesIO(cached.read_bytes()), allow_pickle=False) as table:
            return ShardIndex(
                table["keys"].tolist(), table["labels"], table["offsets"], table["sizes"], []
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        index = read_index(shard)
    # A table of keys is as wide as its longest key. A hostile shard would fill the memory.
    if not index.faults and index.keys and max(map(len, index.keys)) <= KEY_LENGTH:
        _keep(cached, index)
    return index


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "kfac_bench" / "shards"


def _keep(path: Path, index: ShardIndex) -> None:
    """Write an index to the cache. Errors are ignored: without the cache all is only slower."""
    content = io.BytesIO()
    np.savez(
        content,
        keys=np.array(index.keys),
        labels=index.labels,
        offsets=index.offsets,
        sizes=index.sizes,
    )
    # Several ranks may write the same index.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            temporary.write_bytes(content.getvalue())


def read_index(shard: Path) -> ShardIndex:
    """Read the headers of all members and the content of the labels, but not the images.

    An example is `<key>.jpg` (or another of `opening.KINDS`) and `<key>.cls`, its class number in
    digits. As in the webdataset package, the key ends at the first dot of the file name. Other
    members are ignored. These are faults: the end of the shard is missing, two members have the
    same name, a name leads out of the archive, an image has no label, a label has no image, a label
    is invalid.

    Raises:
        OSError: The file cannot be opened.
    """
    faults: list[Unreadable] = []
    images: dict[str, ByteRange] = {}
    labels: dict[str, ByteRange] = {}
    with shard.open("rb") as file:
        for name, place in _members(shard, file, faults):
            folder, _, base = name.rpartition("/")
            stem, _, kind = base.partition(".")
            key = f"{folder}/{stem}" if folder else stem
            table = images if kind.lower() in KINDS else labels if kind == LABEL else None
            if table is None:
                continue
            if key in table:
                faults.append(Unreadable(f"{shard}:{name}", "another member has this name"))
            else:
                table[key] = place
        examples: list[tuple[str, int, int, int]] = []
        for key, (offset, size) in images.items():
            if key not in labels:
                faults.append(Unreadable(f"{shard}:{key}", f"its label {key}.{LABEL} is missing"))
                continue
            label = _label(file, *labels[key])
            if label is None:
                faults.append(Unreadable(f"{shard}:{key}.{LABEL}", "it is not a class number"))
                continue
            examples.append((key, label, offset, size))
    faults += [
        Unreadable(f"{shard}:{key}.{LABEL}", "its image is missing")
        for key in labels.keys() - images.keys()
    ]
    labels_of, offsets, sizes = (np.array([x[i] for x in examples], np.int64) for i in (1, 2, 3))
    faults.sort(key=lambda fault: fault.path)
    return ShardIndex([x[0] for x in examples], labels_of, offsets, sizes, faults)


def _members(shard: Path, file: Any, faults: list[Unreadable]) -> Iterator[tuple[str, ByteRange]]:
    """Yield the name and place of all complete regular files whose names are inside the archive.

    Add a fault for each other member, except folders.
    """
    end = os.fstat(file.fileno()).st_size
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                # tarfile keeps all members in memory: thousands for each shard.
                tar.members.clear()  # type: ignore[attr-defined]
                # Older versions of tarfile would go back, and read the same members for ever.
                if member.size < 0 or tar.offset <= member.offset:
                    raise ValueError(f"{member.name!r} has a negative size")
                if member.isdir():
                    continue
                what = f"{shard}:{member.name}"
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
                    faults.append(Unreadable(what, "it is neither a file nor a folder"))
                elif member.name.startswith("/") or ".." in member.name.split("/"):
                    faults.append(Unreadable(what, "its name leads out of the archive"))
                elif member.offset_data + member.size > end:
                    faults.append(Unreadable(what, "the shard ends before it is complete"))
                else:
                    yield member.name.removeprefix("./"), (member.offset_data, member.size)
            closed = _is_closed(file, tar.offset)
    # tarfile raises exceptions of many types for a damaged header.
    except Exception as error:
        reason = Unreadable.because(shard, error).reason
        faults.append(Unreadable(str(shard), f"it is damaged: {reason}"))
        return
    if not closed:
        faults.append(Unreadable(str(shard), "it is damaged: its end is missing"))


def _is_closed(file: Any, offset: int) -> bool:
    """Return whether the shard ends with an empty block, as every complete archive does.

    tarfile does not check the end: it also stops at a bad or missing header.
    """
    file.seek(offset)
    return bool(file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE))


def _label(file: Any, offset: int, size: int) -> int | None:
    if size > LABEL_BYTES:
        return None
    file.seek(offset)
    text = file.read(size).strip()
    return int(text) if text.isdigit() and len(text) < 10 else None
