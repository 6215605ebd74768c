"""ImageNet as tar shards in the layout of the webdataset package: `train-000000.tar`, `val-...`.

Examples are read one by one from where an index says that they lie, not from a stream: so their
order, their share among ranks and a run that resumes are the same as for images in folders.
"""

import io
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from kfac_bench.data.base.dataset import Data
from kfac_bench.data.base.order import epoch_order
from kfac_bench.data.base.unreadable import Faults, Unreadable
from kfac_bench.data.images import imagefolder, reading
from kfac_bench.data.images.tar_index import LABEL, index_of
from kfac_bench.errors import UsageError

LAYOUT = "train-<number>.tar and val-<number>.tar of <key>.jpg and <key>.cls"
PER_SHARD = 1000


class Shards:
    """All shards of a split as one sequence of images; see reading.Source."""

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
        """The shard's path and the key in it."""
        return f"{self.paths[self._shards[index]]}:{self._keys[index]}"

    def read(self, index: int) -> bytes:
        """The image; of a shard that has shrunk since it was indexed, what is left."""
        with self.paths[self._shards[index]].open("rb", buffering=0) as file:
            file.seek(int(self._offsets[index]))
            content: bytes = file.read(int(self._sizes[index]))
            return content


def load(root: Path, image_size: int = 224, workers: int = 4, on_error: str = "fatal") -> Data:
    """Open the shards in `root`; see reading.ImageData, shard_index.read_index.

    There are as many classes as the largest label of a training image says. Raises UsageError for
    missing shards, for what is wrong with one, unless `on_error` is "skip", and, likewise, while
    iterating, for a corrupt image.
    """
    train, evaluation = Shards(root, "train"), Shards(root, "val")
    faults = Faults(skip=on_error == "skip")
    faults.add_all(root, train.faults + evaluation.faults)
    if not train.labels or not evaluation.labels:
        raise UsageError(
            f"{root} has {len(train.labels)} good images in train-*.tar and "
            f"{len(evaluation.labels)} in val-*.tar: both need one"
        )
    classes = max(train.labels) + 1
    if max(evaluation.labels) >= classes:
        raise UsageError(
            f"{root}: an image of val-*.tar is of class {max(evaluation.labels)}, "
            f"those of train-*.tar of 0 to {classes - 1}"
        )
    return reading.ImageData("shards", train, evaluation, classes, image_size, workers, faults)


def scan(root: Path) -> tuple[dict[str, int], list[tuple[Path, str]]]:
    """Decode every image: how many are good by split, and (member, fault) of the others.

    Raises UsageError for missing shards.
    """
    counts: dict[str, int] = {}
    faults: list[Unreadable] = []
    for split in ("train", "val"):
        shards = Shards(root, split)
        bad = [x for i in range(len(shards.labels)) if (x := reading.check(shards, i))]
        counts[split] = len(shards.labels) - len(bad)
        faults += shards.faults + bad
    return counts, [(Path(fault.path), fault.reason) for fault in faults]


def write(root: Path, source: Path, per_shard: int = PER_SHARD) -> Iterator[str]:
    """Pack ImageNet's folders `source/train` and `source/val` into shards in `root`.

    Yields a line per shard written. Images are copied byte for byte, `per_shard` of them a file, in
    an order that mixes classes, for readers that stream; `classes.txt` has the names of the classes
    by number. The same folders give the same shards. Raises UsageError if there are shards
    already, and as imagefolder.load does.
    """
    if per_shard < 1:
        raise UsageError(f"a shard needs an image, got {per_shard} per shard")
    if any(root.glob("train-*.tar")) or any(root.glob("val-*.tar")):
        raise UsageError(f"{root} has shards already: choose another folder")
    folders = imagefolder.open_folders(source)
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / "classes.txt").write_text("".join(f"{name}\n" for name in folders[0].classes))
        for split, folder in zip(("train", "val"), folders, strict=True):
            order = epoch_order(len(folder.labels), 0, 0).tolist()
            for number, start in enumerate(range(0, len(order), per_shard)):
                path = root / f"{split}-{number:06d}.tar"
                _write_shard(path, folder, order[start : start + per_shard], start)
                yield f"{path}: {len(order[start : start + per_shard])} images"
    except OSError as error:
        raise UsageError(f"{error.filename or root}: {error.strerror or error}") from None


def _write_shard(path: Path, source: reading.Source, indices: Sequence[int], start: int) -> None:
    """Under another name until it is whole."""
    own = path.with_suffix(".tmp")
    with ExitStack() as stack:
        stack.callback(own.unlink, missing_ok=True)
        with tarfile.open(own, "w", format=tarfile.USTAR_FORMAT) as tar:
            for number, index in enumerate(indices, start):
                kind = source.name(index).rpartition(".")[2].lower()
                _add(tar, f"{number:08d}.{'jpg' if kind == 'jpeg' else kind}", source.read(index))
                _add(tar, f"{number:08d}.{LABEL}", str(source.labels[index]).encode())
        own.replace(path)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
