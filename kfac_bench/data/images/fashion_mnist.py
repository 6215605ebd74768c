"""Reading Fashion-MNIST: 70,000 grey images of 28 x 28 pixels, of ten kinds of clothing.

The data are four idx files, plain or with gzip, as published by Zalando. Debian's package
dataset-fashion-mnist installs them.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kfac_bench.data.base.in_memory import LabelledImages
from kfac_bench.data.base.unreadable import Unreadable
from kfac_bench.data.images import idx_files
from kfac_bench.errors import UsageError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Folder of Debian's package dataset-fashion-mnist."""
SIDE = 28
MOST = 60_000
"""Images of the published training set. No file may have more."""
MEAN, STD = 0.2860, 0.3530
"""Mean and standard deviation of the pixels, in [0, 1], of the 60,000 training images."""
CLASSES = (
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
)
SPLITS = {"train": "train", "eval": "t10k"}
"""How the names of a split's two files begin."""
ENDS = {"images": "-images-idx3-ubyte", "labels": "-labels-idx1-ubyte"}
NAMES = tuple(begin + end for begin in SPLITS.values() for end in ENDS.values())


def load(
    root: Path | None = None,
    train_images: int | None = None,
    eval_images: int | None = None,
    normalize: bool = True,
) -> LabelledImages:
    """Return Fashion-MNIST as images [n, 1, 28, 28].

    Args:
        root: Folder of the four files; None: the folder of Debian's package.
        train_images: The first so many images of the training files are used; None: all.
        eval_images: The same for evaluation.
        normalize: Whether `prepare` subtracts MEAN and divides by STD. Reconstruction needs pixels
            in [0, 1], because its error is meant in pixels.

    Raises:
        UsageError: A file is missing or damaged, or has fewer images than the options ask for.
    """
    folder = DEBIAN if root is None else root
    parts = {}
    for split in SPLITS:
        try:
            parts[split] = _read_split(folder, split)
        except _BadFileError as error:
            raise UsageError(f"Fashion-MNIST: {error.file} {error}. {_how_to_get(root)}") from error
    train = _first(*parts["train"], train_images, "data.train_images", folder)
    evaluation = _first(*parts["eval"], eval_images, "data.eval_images", folder)
    return LabelledImages(
        "fashion_mnist",
        train,
        evaluation,
        num_classes=len(CLASSES),
        mean=[MEAN] if normalize else None,
        std=[STD] if normalize else None,
        classes=CLASSES,
    )


def is_at(root: Path) -> bool:
    """Return whether the folder has one of the four files."""
    return any(path_of(root, name).is_file() for name in NAMES)


def scan(root: Path) -> tuple[str, list[Unreadable]]:
    """Read the files. Return what the folder has, in words, and its missing and damaged files.

    A split with a fault counts as a split without images.
    """
    counts, faults = dict.fromkeys(SPLITS, 0), list[Unreadable]()
    for split in SPLITS:
        try:
            counts[split] = len(_read_split(root, split)[1])
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
    if labels.max() >= len(CLASSES):
        raise _BadFileError(
            labels_path, f"is damaged: it has the label {labels.max()}, allowed are 0 to 9"
        )
    # The arrays share the memory of the files' bytes, which torch must not be able to change.
    return torch.tensor(images).unsqueeze(1), torch.tensor(labels).long()


def _read(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    if not path.is_file():
        raise _BadFileError(path, "is missing")
    try:
        return idx_files.read(path, shape, MOST)
    except ValueError as error:
        raise _BadFileError(path, f"is damaged: {error}") from error
    except OSError as error:
        raise _BadFileError(path, f"cannot be read: {error.strerror or error}") from error


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


def _how_to_get(root: Path | None) -> str:
    """Return what the user can do about a missing or damaged file."""
    names = ", ".join(NAMES)
    if root is None:
        return (
            "Install Debian's package dataset-fashion-mnist, or set data.root to a folder with "
            f"the files {names} (plain or .gz). kfac-data fetch fashion_mnist DIR downloads them. "
            "data.root=demo makes a small demo"
        )
    return (
        f"data.root must be a folder with the files {names} (plain or .gz). kfac-data fetch "
        f"fashion_mnist DIR gets them; Debian's package dataset-fashion-mnist installs them in "
        f"{DEBIAN}"
    )
