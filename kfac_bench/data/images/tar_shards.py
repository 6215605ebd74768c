"""ImageNet as tar shards in the layout of the webdataset package: `train-000000.tar`, `val-...`.

The index of each shard says where an example is, so examples are read in any order, not as a
stream. Their order, the part of each rank and a resumed run are the same as for images in folders.
Reading the headers of a shard takes time, so the index is kept in the user's cache.
"""

import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfac_bench.data.base.dataset import Data
from kfac_bench.data.base.files import Faults, Unreadable, cache_folder, left_out, regular
from kfac_bench.data.base.order import epoch_order
from kfac_bench.data.images import imagefolder, reading
from kfac_bench.data.images.opening import KINDS, check_file_size
from kfac_bench.errors import UsageError
from kfac_bench.whole_files import whole_file

LAYOUT = "train-<number>.tar and val-<number>.tar of <key>.jpg and <key>.cls"
PER_SHARD = 1000
"""Images per file that `write` makes."""


class TarShards:
    """All shards of a split as one sequence of images; a `reading.Source`."""

    def __init__(self, root: Path, split: str) -> None:
        self.paths = sorted(root.glob(f"{split}-*.tar"))
        if not self.paths:
            raise UsageError(f"no shards {root}/{split}-*.tar: expected {LAYOUT} in {root}")
        try:
            indices = [index_of(path) for path in self.paths]
        except OSError as error:
            raise UsageError(f"{error.filename}: {error.strerror}") from None
        self.faults = [fault for index in indices for fault in index.faults]
        self._keys = [key for index in indices for key in index.keys]
        self._shards = np.repeat(np.arange(len(indices)), [len(index.keys) for index in indices])
        self._offsets = np.concatenate([index.offsets for index in indices])
        self._sizes = np.concatenate([index.sizes for index in indices])
        self.labels: Sequence[int] = np.concatenate([index.labels for index in indices]).tolist()

    def name(self, index: int) -> str:
        """Return the path of the shard, and the key of the image in it."""
        return f"{self.paths[self._shards[index]]}:{self._keys[index]}"

    def read(self, index: int) -> bytes:
        """Return the encoded image, or less if the shard has shrunk since it was indexed.

        Raises:
            ValueError: The image has more than `opening.MOST_FILE_BYTES`.
            OSError: The shard cannot be read.
        """
        check_file_size(int(self._sizes[index]))
        with self.paths[self._shards[index]].open("rb", buffering=0) as file:
            file.seek(int(self._offsets[index]))
            # Unbuffered: a buffer would read beyond the image.
            content: bytes = file.read(int(self._sizes[index]))
            return content

    def fingerprint_parts(self) -> Iterator[bytes]:
        """Yield the names of the shards, and the key, size and label of each image."""
        for path in self.paths:
            yield os.fsencode(f"{path.name}\n")
        yield os.fsencode("\n".join(self._keys))
        for numbers in (self._shards, self._sizes, self.labels):
            yield np.asarray(numbers, np.int64).tobytes()


def load(
    root: Path,
    image_size: int = 224,
    workers: int = 4,
    on_error: str = "fatal",
    *,
    augment: bool | str = True,
) -> Data:
    """Open the shards in `root`; see `reading.ImageData` and `read_index`.

    The number of classes is the largest label of a training image plus 1.

    Raises:
        UsageError: Shards are missing. Unless `on_error` is "skip" also: a shard has faults or,
            while iterating, an image cannot be decoded.
    """
    train, evaluation = TarShards(root, "train"), TarShards(root, "val")
    faults = Faults(skip=on_error == "skip")
    faults.add_all(root, train.faults + evaluation.faults)
    if not train.labels or not evaluation.labels:
        raise UsageError(
            f"{root} has {len(train.labels)} good images in train-*.tar and "
            f"{len(evaluation.labels)} in val-*.tar: at least one is needed in each"
            f"{left_out(train.faults + evaluation.faults)}"
        )
    classes = max(train.labels) + 1
    if classes > reading.MOST_CLASSES:
        raise UsageError(
            f"{root}: an image of train-*.tar has the class {classes - 1}, but classes must be "
            f"below {reading.MOST_CLASSES}"
        )
    if max(evaluation.labels) >= classes:
        raise UsageError(
            f"{root}: an image of val-*.tar has the class {max(evaluation.labels)}, "
            f"but the classes of train-*.tar are 0 to {classes - 1}"
        )
    return reading.ImageData(
        "shards", train, evaluation, classes, image_size, workers, faults, augment=augment
    )


def scan(root: Path) -> tuple[dict[str, int], list[Unreadable]]:
    """Decode every image; see `reading.scan`. Raise UsageError for missing shards."""
    return reading.scan({split: TarShards(root, split) for split in ("train", "val")})


def write(root: Path, source: Path, per_shard: int = PER_SHARD) -> Iterator[str]:
    """Pack ImageNet's folders `source/train` and `source/val` into shards in `root`.

    Yield a line for each shard that was written, and for files that are left out. Images are
    copied byte for byte, `per_shard` of them into each file. Their order mixes the classes, for
    other programs that read shards as a stream. `classes.txt` has the names of the classes by
    number. The same folders give the same shards.

    Raises:
        UsageError: `root` has shards already, or a file is too large; also as in
            `imagefolder.load`.
    """
    if per_shard < 1:
        raise UsageError(f"images per shard must be at least 1, got {per_shard}")
    if any(root.glob("train-*.tar")) or any(root.glob("val-*.tar")):
        raise UsageError(f"{root} has shards already. Choose another folder")
    folders = imagefolder.open_folders(source)
    written: list[Path] = []
    try:
        root.mkdir(parents=True, exist_ok=True)
        names = "".join(f"{name}\n" for name in folders[0].classes)
        # Names of folders are bytes, and need not be UTF-8.
        (root / "classes.txt").write_bytes(os.fsencode(names))
        for split, folder in zip(("train", "val"), folders, strict=True):
            yield from folder.notes
            order = epoch_order(len(folder.labels), 0, 0).tolist()
            for number, start in enumerate(range(0, len(order), per_shard)):
                path = root / f"{split}-{number:06d}.tar"
                written.append(path)
                _write_shard(path, folder, order[start : start + per_shard], start)
                yield f"{path}: {len(order[start : start + per_shard])} images"
    except BaseException as error:
        # A part of the shards would count as a whole, smaller dataset.
        for path in written:
            path.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise UsageError(f"{error.filename or root}: {error.strerror or error}") from None


def _write_shard(path: Path, source: reading.Source, indices: Sequence[int], start: int) -> None:
    """Write one shard as a whole."""
    with (
        whole_file(path) as temporary,
        tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for number, index in enumerate(indices, start):
            kind = source.name(index).rpartition(".")[2].lower()
            content = _encoded(source, index)
            _add(tar, f"{number:08d}.{'jpg' if kind == 'jpeg' else kind}", content)
            _add(tar, f"{number:08d}.{LABEL}", str(source.labels[index]).encode())


def _encoded(source: reading.Source, index: int) -> bytes:
    try:
        return source.read(index)
    except ValueError as error:  # the file is too large
        raise UsageError(f"{source.name(index)}: {error}. Remove this file") from None


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


# ---- the index of a shard

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
    cached = cache_folder("shards") / f"{hashlib.sha256(os.fsencode(key)).hexdigest()}.npz"
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
