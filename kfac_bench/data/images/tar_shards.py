"""ImageNet as tar shards in the layout of the webdataset package: `train-000000.tar`, `val-...`.

The index of each shard says where an example is, so examples are read in any order, not as a
stream. Their order, the part of each rank and a resumed run are the same as for images in folders.
"""

import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kfac_bench.data.base.dataset import Data
from kfac_bench.data.base.order import epoch_order
from kfac_bench.data.base.unreadable import Faults, Unreadable, left_out
from kfac_bench.data.images import imagefolder, reading
from kfac_bench.data.images.opening import check_file_size
from kfac_bench.data.images.tar_index import LABEL, index_of
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

    def contents(self) -> Iterator[bytes]:
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
    augment: bool = True,
) -> Data:
    """Open the shards in `root`; see `reading.ImageData` and `tar_index.read_index`.

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
                _write_shard(path, folder, order[start : start + per_shard], start)
                yield f"{path}: {len(order[start : start + per_shard])} images"
    except OSError as error:
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
