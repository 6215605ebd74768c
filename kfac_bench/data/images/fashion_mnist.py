"""Fashion-MNIST: 70,000 grey images of 28 x 28 pixels, of ten kinds of clothing.

The data are four idx files, plain or with gzip, as published by Zalando. Debian's package
dataset-fashion-mnist installs them, and ``kfac-data fetch fashion_mnist`` downloads them. The demo
has the same layout with other images. torchvision's reader accepts no packed file and reads a file
of any size, so the short reader of idx files is here.
"""

import gzip
import hashlib
import http.client
import math
import shutil
import struct
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kfac_bench.data.base.files import Unreadable
from kfac_bench.data.base.in_memory import LabelledImages
from kfac_bench.errors import UsageError
from kfac_bench.whole_files import whole_file

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
"""The beginning of the names of a split's two files."""
ENDS = {"images": "-images-idx3-ubyte", "labels": "-labels-idx1-ubyte"}
NAMES = tuple(begin + end for begin in SPLITS.values() for end in ENDS.values())
MAGIC = 0x800
"""First number of an idx file of bytes, without the number of dimensions in its last byte."""
MOST_DOWNLOAD_BYTES = 32 * 2**20
"""More than the largest of the published files has."""
TIMEOUT_S = 30


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


def _how_to_get(root: Path | None) -> str:
    """Return the ways to get the files, for a message about a missing or damaged file."""
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


# ---- kfac-data fetch fashion_mnist ----


def fetch(root: Path, url: str | None, say: Callable[[str], None]) -> None:
    """Put the four files into `root`, which is made if it does not exist, and read them.

    Args:
        root: The folder. Files of these names that it has already are kept.
        url: Address of a folder with the four .gz files. None: Debian's package if it is installed,
            else the address of the authors.
        say: Prints a line for each file.

    Raises:
        UsageError: A file cannot be had or is damaged, or `root` cannot be written.
    """
    from torchvision.datasets import FashionMNIST

    if url is not None and not url.startswith(("http://", "https://")):
        raise UsageError(f"{url}: must be an address that begins with http:// or https://")
    try:
        root.mkdir(parents=True, exist_ok=True)
        for file, md5 in FashionMNIST.resources:
            name = file.removesuffix(".gz")
            installed = path_of(DEBIAN, name)
            if path_of(root, name).exists():
                say(f"{name}: was there already")
            elif url is None and installed.is_file():
                with whole_file(root / installed.name) as temporary:
                    shutil.copyfile(installed, temporary)
                say(f"{name}: copied from {installed}")
            else:
                address = f"{(url or FashionMNIST.mirrors[0]).rstrip('/')}/{file}"
                content = _download(address, md5)
                with whole_file(root / file) as temporary:
                    temporary.write_bytes(content)
                say(f"{name}: downloaded from {address}")
    except OSError as error:
        raise UsageError(f"{root}: cannot be written ({error.strerror or error})") from None
    load(root)


def _download(address: str, md5: str) -> bytes:
    """Return a file of a web server.

    Raises:
        UsageError: The server cannot be reached, or the file is not the published one.
    """
    other_ways = "Use another --url, or install Debian's package dataset-fashion-mnist"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as response:  # noqa: S310 (checked)
            content: bytes = response.read(MOST_DOWNLOAD_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        raise UsageError(
            f"{address}: the server answers {error.code} {error.reason}. {other_ways}"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UsageError(f"{address}: cannot be reached ({reason}). {other_ways}") from None
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise UsageError(
            f"{address}: is not the published file, or the connection broke: its MD5 is wrong. "
            f"Run the same command again. {other_ways}"
        )
    return content
