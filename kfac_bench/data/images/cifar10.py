"""CIFAR-10 from the published archives: packed or unpacked, binary or Python version.

torchvision reads the Python version, which holds pickles. A pickle of somebody else could run code,
so torchvision first compares the MD5 of each file with the published one. The binary version holds
plain bytes, so its files may have any content: the demo has this layout.
"""

import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kfac_bench.data.base.in_memory import LabelledImages
from kfac_bench.data.images.random_methods import RandomMethod
from kfac_bench.errors import UsageError

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
PIXELS = 3 * 32 * 32
PADDING = 4
MAX_FILE_BYTES = 64 * 2**20
"""The published files have 31 MB."""
PYTHON = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
"""Files of the Python version. The last one is for evaluation."""
BINARY = tuple(f"{name}.bin" for name in PYTHON)
FOLDERS = {"cifar-10-batches-bin": BINARY, "cifar-10-batches-py": PYTHON}
ARCHIVES = {
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
}
"""The published archives with their MD5. Another file of this name is not unpacked."""

CifarPart = tuple[Tensor, Tensor]
"""uint8 images [n, 3, 32, 32] and int64 labels [n]."""


def load(root: Path, augment: bool | str = True) -> LabelledImages:
    """Return CIFAR-10 from `root`, normalized per channel.

    `root` holds `cifar-10-batches-bin/` or `cifar-10-batches-py/`, or their archives
    `cifar-10-binary.tar.gz` or `cifar-10-python.tar.gz`. It may also be one of these four itself.
    An archive is unpacked into a temporary folder.

    Args:
        root: Where the dataset is.
        augment: Augment training images with `crop_and_flip`; then also with this method of
            `random_methods`, if it is a name.

    Raises:
        UsageError: A file is missing or damaged, or a pickle or archive is not the published one.
    """
    train, evaluation = _read(root)
    return LabelledImages(
        "cifar10",
        train,
        evaluation,
        num_classes=10,
        mean=MEAN,
        std=STD,
        classes=CLASSES,
        augment=augmentation(augment),
    )


def augmentation(augment: bool | str) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return the function that augments a batch; see `load` for the argument."""
    if not isinstance(augment, str):
        return crop_and_flip if augment else None
    method = RandomMethod(augment)
    return lambda images, draws: method.of_batch(crop_and_flip(images, draws), draws)


def is_at(root: Path) -> bool:
    """Return whether the folder or file has one of the layouts that `load` reads."""
    return (
        root.is_file()
        or any(root.glob("cifar-10-*"))
        or any((root / name).is_file() for name in PYTHON + BINARY)
    )


def crop_and_flip(images: Tensor, draws: Tensor) -> Tensor:
    """Pad each image [n, C, H, W] by 4 zeros, crop it at random to its size, and flip half of them.

    As in He et al. 2016, section 4.2. `draws` [n, 3] are random numbers in [0, 1): top, left, flip.
    """
    count, _, height, width = images.shape
    top, left = (draws[:, :2] * (2 * PADDING + 1)).long().T[:, :, None]
    flip = draws[:, 2:] < 0.5
    rows = top + torch.arange(height)
    columns = left + torch.where(flip, torch.arange(width).flip(0), torch.arange(width))
    # One gather crops and flips all images, which is faster than a loop over images.
    padded = functional.pad(images, (PADDING,) * 4)
    example = torch.arange(count)[:, None, None]
    cropped = padded[example, :, rows[:, :, None], columns[:, None, :]]  # [n, H, W, C]
    return cropped.permute(0, 3, 1, 2).contiguous()


def decode_binary(content: bytes) -> CifarPart:
    """Decode records of one label byte and 3072 pixels (channel, row, column).

    Raises:
        ValueError: The content is not a whole number of records, or a label is not in 0..9.
    """
    if not content or len(content) % (PIXELS + 1):
        raise ValueError(
            f"{len(content)} bytes are not a whole number of {PIXELS + 1}-byte records"
        )
    records = torch.from_numpy(np.frombuffer(content, np.uint8).copy()).view(-1, PIXELS + 1)
    if records[:, 0].max() > 9:
        raise ValueError("a label is not in 0..9")
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def _read(root: Path) -> tuple[CifarPart, CifarPart]:
    """Return the training and the evaluation images of the first layout that `root` has."""
    for (folder, names), archive in zip(FOLDERS.items(), ARCHIVES, strict=True):
        for place in (root / folder, root):
            if any((place / name).is_file() for name in names):
                return _read_python(place) if names is PYTHON else _read_binary(place)
        for place in (root / archive, root):
            if place.name == archive and place.is_file():
                return _read_archive(place)
    raise UsageError(
        f"no CIFAR-10 in {root}: expected {root}/cifar-10-batches-bin/data_batch_1.bin (or "
        "cifar-10-batches-py/, cifar-10-binary.tar.gz, cifar-10-python.tar.gz); "
        "download one from https://www.cs.toronto.edu/~kriz/cifar.html"
    )


def _read_binary(folder: Path) -> tuple[CifarPart, CifarPart]:
    parts = []
    for path in (folder / name for name in BINARY):
        if not path.is_file():
            raise UsageError(
                f"CIFAR-10: {folder} lacks the file {path.name}. Unpack the archive again"
            )
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"CIFAR-10: {path} is too large to be the published file")
        try:
            parts.append(decode_binary(path.read_bytes()))
        except ValueError as error:
            raise UsageError(f"CIFAR-10: {path.name} in {folder} is damaged: {error}") from error
    *train, evaluation = parts
    images, labels = zip(*train, strict=True)
    return (torch.cat(images), torch.cat(labels)), evaluation


def _read_python(folder: Path) -> tuple[CifarPart, CifarPart]:
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity

    class PublishedFiles(CIFAR10):  # type: ignore[misc]
        base_folder = ""  # the folder may have any name

    try:
        datasets = [PublishedFiles(folder, train) for train in (True, False)]
    except RuntimeError:
        meta = CIFAR10.meta
        files = [*CIFAR10.train_list, *CIFAR10.test_list, (meta["filename"], meta["md5"])]
        bad = next(name for name, md5 in files if not check_integrity(folder / name, md5))
        what = (
            "is not the published file: its MD5 is wrong"
            if (folder / bad).exists()
            else "is missing"
        )
        raise UsageError(f"CIFAR-10: {folder / bad} {what}. Unpack the archive again") from None
    train, evaluation = (
        (torch.from_numpy(d.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(d.targets))
        for d in datasets
    )
    return train, evaluation


def _read_archive(archive: Path) -> tuple[CifarPart, CifarPart]:
    from torchvision.datasets.utils import check_integrity

    if not check_integrity(archive, ARCHIVES[archive.name]):
        raise UsageError(
            f"CIFAR-10: {archive} is not the published archive: its MD5 is wrong. Download it again"
        )
    with tempfile.TemporaryDirectory() as unpacked, tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
        return _read(Path(unpacked))
