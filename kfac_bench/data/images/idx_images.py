"""MNIST and Fashion-MNIST: 70,000 grey images of 28 x 28 pixels, of digits or kinds of clothing.

Each has four idx files, plain or with gzip, as published. Debian's package dataset-fashion-mnist
installs those of Fashion-MNIST, and ``kfac-data fetch`` downloads either. The demo has the same
layout with other images. torchvision's reader accepts no packed file and reads a file of any size,
so the short reader of idx files is here.
"""

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kfac_bench.data.base.files import Unreadable
from kfac_bench.data.base.in_memory import LabelledImages
from kfac_bench.errors import UsageError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Folder of Debian's package dataset-fashion-mnist."""
SIDE = 28
MOST = 60_000
"""Images of the published training sets. No file may have more."""


@dataclass(frozen=True)
class IdxDataset:
    """One of the two datasets. Their files have the same names.

    Attributes:
        name: Name in the configuration.
        title: Name in messages.
        published: Class of torchvision that knows addresses and MD5.
        mean: Mean of the pixels, in [0, 1], of the 60,000 training images.
        std: Standard deviation of these pixels.
        classes: Names of the labels.
        first: The first evaluation labels, by which both are told apart.
    """

    name: str
    title: str
    published: str
    mean: float
    std: float
    classes: Sequence[str]
    first: Sequence[int]


FASHION_MNIST = IdxDataset(
    "fashion_mnist",
    "Fashion-MNIST",
    "FashionMNIST",
    0.2860,
    0.3530,
    (
        "T-shirt/top",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    ),
    (9, 2, 1, 1, 6, 1, 4, 6, 5, 7),
)
MNIST = IdxDataset(
    "mnist",
    "MNIST",
    "MNIST",
    0.1307,
    0.3081,
    tuple("0123456789"),
    (7, 2, 1, 0, 4, 1, 4, 9, 5, 9),
)
DATASETS = {dataset.name: dataset for dataset in (FASHION_MNIST, MNIST)}
SPLITS = {"train": "train", "eval": "t10k"}
"""The beginning of the names of a split's two files."""
ENDS = {"images": "-images-idx3-ubyte", "labels": "-labels-idx1-ubyte"}
NAMES = tuple(begin + end for begin in SPLITS.values() for end in ENDS.values())
MAGIC = 0x800
"""First number of an idx file of bytes, without the number of dimensions in its last byte."""


def load(
    root: Path | None = None,
    train_images: int | None = None,
    eval_images: int | None = None,
    normalize: bool = True,
    dataset: IdxDataset = FASHION_MNIST,
) -> LabelledImages:
    """Return a dataset as images [n, 1, 28, 28].

    Args:
        root: Folder of the four files, or the one that torchvision has made, where they are below
            `<class>/raw`; None: the folder of Debian's package.
        train_images: The first so many images of the training files are used; None: all.
        eval_images: The same for evaluation.
        normalize: Whether `prepare` subtracts the mean and divides by the standard deviation.
            Reconstruction needs pixels in [0, 1], because its error is meant in pixels.
        dataset: The dataset.

    Raises:
        UsageError: A file is missing or damaged, has fewer images than the options ask for, or
            belongs to the other dataset.
    """
    folder = DEBIAN if root is None else folder_of(root, dataset)
    parts = {}
    for split in SPLITS:
        try:
            parts[split] = _read_split(folder, split)
        except _BadFileError as error:
            reason = f"{dataset.title}: {error.file} {error}. {_how_to_get(root, dataset)}"
            raise UsageError(reason) from error
    found = _dataset_of(parts["eval"][1])
    if found not in (dataset, None):
        raise UsageError(
            f"{folder} has the files of {found.title}, not of {dataset.title}. Use "
            f"data={found.name}, or set data.root to another folder"
        )
    train = _first(*parts["train"], train_images, "data.train_images", folder)
    evaluation = _first(*parts["eval"], eval_images, "data.eval_images", folder)
    return LabelledImages(
        dataset.name,
        train,
        evaluation,
        num_classes=len(dataset.classes),
        mean=[dataset.mean] if normalize else None,
        std=[dataset.std] if normalize else None,
        classes=dataset.classes,
    )


def folder_of(root: Path, dataset: IdxDataset) -> Path:
    """Return `<root>/<class>/raw` if torchvision has made this folder, else `root`."""
    made = root / dataset.published / "raw"
    return made if made.is_dir() else root


def _dataset_of(labels: Tensor) -> IdxDataset | None:
    """Return the dataset that has these first evaluation labels; None: other files, as a demo."""
    first = tuple(labels[:10].tolist())
    return next((dataset for dataset in DATASETS.values() if dataset.first == first), None)


def is_at(root: Path, dataset: IdxDataset = FASHION_MNIST) -> bool:
    """Return whether the folder has one of the four files, and they do not belong to the other."""
    folder = folder_of(root, dataset)
    if not any(path_of(folder, name).is_file() for name in NAMES):
        return False
    try:
        found = _dataset_of(_read_split(folder, "eval")[1])
    except _BadFileError:
        found = None
    return (found or FASHION_MNIST) == dataset


def scan(root: Path, dataset: IdxDataset = FASHION_MNIST) -> tuple[str, list[Unreadable]]:
    """Read the files. Return what the folder has, in words, and its missing and damaged files.

    A split with a fault counts as a split without images.
    """
    counts, faults = dict.fromkeys(SPLITS, 0), list[Unreadable]()
    for split in SPLITS:
        try:
            counts[split] = len(_read_split(folder_of(root, dataset), split)[1])
        except _BadFileError as error:
            faults.append(Unreadable.because(error.file, error))
    return f"{counts['train']} images to train on, {counts['eval']} to evaluate", faults


class _BadFileError(Exception):
    """A file that is missing or damaged. The text continues a sentence that begins with `file`."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(reason)
        self.file = file


def _read_split(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return the uint8 images [n, 1, 28, 28] and the int64 labels [n] of a split."""
    images_path, labels_path = (path_of(folder, SPLITS[split] + end) for end in ENDS.values())
    images = _read(images_path, (SIDE, SIDE))
    labels = _read(labels_path, ())
    if len(images) != len(labels):
        raise _BadFileError(
            labels_path,
            f"has {len(labels)} labels, but {images_path.name} has {len(images)} images",
        )
    if labels.max() > 9:
        raise _BadFileError(
            labels_path, f"is damaged: it has the label {labels.max()}, allowed are 0 to 9"
        )
    # The arrays share the memory of the files' bytes, which torch must not be able to change.
    return torch.tensor(images).unsqueeze(1), torch.tensor(labels).long()


def _read(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return the array of an idx file, uint8 [n, *shape].

    The header is checked first, and no more bytes are read than it announces, so a forged file
    cannot fill the memory.
    """
    if not path.is_file():
        raise _BadFileError(path, "is missing")
    numbers = struct.Struct(f">{2 + len(shape)}I")
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(numbers.size)
            if len(header) < numbers.size:
                raise _BadFileError(path, f"is damaged: its header has only {len(header)} bytes")
            magic, count, *sizes = numbers.unpack(header)
            if magic != MAGIC + 1 + len(shape) or sizes != list(shape) or not 1 <= count <= MOST:
                raise _BadFileError(
                    path,
                    f"is damaged: its header has the magic number {magic:#x} and announces {count} "
                    f"items of the shape {sizes}; allowed are {MAGIC + 1 + len(shape):#x} and 1 to "
                    f"{MOST} items of the shape {list(shape)}",
                )
            expected = count * math.prod(shape)
            # One byte more than expected shows a file that is too long, and makes gzip read its
            # checksum.
            content = file.read(expected + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _BadFileError(path, f"is damaged: it is not a whole gzip file: {error}") from error
    except OSError as error:
        raise _BadFileError(path, f"cannot be read: {error.strerror or error}") from error
    if len(content) != expected:
        found = "more" if len(content) > expected else f"only {len(content)}"
        raise _BadFileError(
            path, f"is damaged: its header announces {expected} bytes of data, but it has {found}"
        )
    return np.frombuffer(content, np.uint8).reshape(count, *shape)


def write(path: Path, array: NDArray[np.uint8]) -> None:
    """Write an array as an idx file with gzip. The same array makes the same file."""
    header = struct.pack(f">{1 + array.ndim}I", MAGIC + array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes(), mtime=0))


def path_of(folder: Path, name: str) -> Path:
    """Return the path of a plain file if there is one, else the path of the gzip file."""
    plain = folder / name
    return plain if plain.is_file() else folder / f"{name}.gz"


def _first(
    images: Tensor, labels: Tensor, count: int | None, option: str, folder: Path
) -> tuple[Tensor, Tensor]:
    if count is not None and count > len(labels):
        most = len(labels)
        raise UsageError(
            f"{option}={count}: {folder} has only {most} such images. "
            f"Set {option} to {most} or less"
        )
    return images[:count], labels[:count]


def _how_to_get(root: Path | None, dataset: IdxDataset) -> str:
    """Return the ways to get the files, for a message about a missing or damaged file."""
    names = ", ".join(NAMES)
    if root is None:
        return (
            "Install Debian's package dataset-fashion-mnist, or set data.root to a folder with "
            f"the files {names} (plain or .gz). kfac-data fetch fashion_mnist DIR downloads them. "
            "data.root=demo makes a small demo"
        )
    installed = (
        f"; Debian's package dataset-fashion-mnist installs them in {DEBIAN}"
        if dataset == FASHION_MNIST
        else ""
    )
    return (
        f"data.root must be a folder with the files {names} (plain or .gz). kfac-data fetch "
        f"{dataset.name} DIR gets them{installed}"
    )
