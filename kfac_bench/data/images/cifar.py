"""CIFAR-10 and CIFAR-100 from the published archives: packed or unpacked, binary or Python version.

torchvision reads the Python version, which holds pickles. A pickle of somebody else could run code,
so torchvision first compares the MD5 of each file with the published one. The binary version holds
plain bytes, so its files may have any content: the demo has this layout.
"""

import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kfac_bench.data.base.in_memory import LabelledImages
from kfac_bench.data.images.random_methods import RandomMethod
from kfac_bench.errors import UsageError

PIXELS = 3 * 32 * 32
PADDING = 4
MAX_FILE_BYTES = 256 * 2**20
"""The largest published file has 154 MB."""


@dataclass(frozen=True)
class CifarDataset:
    """One of the two datasets, as it is published.

    Attributes:
        name: Name in the configuration.
        title: Name in messages, and of the class of torchvision without the hyphen.
        folders: Files by the name of their folder: the binary version, then the Python version.
            The last file of each is for evaluation.
        archives: MD5 of the published archives, in the order of `folders`. Another file of this
            name is not unpacked.
        label_bytes: Bytes before the pixels of a record; the last one is the label.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
        classes: Names of the labels.
    """

    name: str
    title: str
    folders: Mapping[str, Sequence[str]]
    archives: Mapping[str, str]
    label_bytes: int
    mean: Sequence[float]
    std: Sequence[float]
    classes: Sequence[str]


_FINE = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree
orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum
rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train
trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR10 = CifarDataset(
    "cifar10",
    "CIFAR-10",
    {"cifar-10-batches-bin": [f"{n}.bin" for n in _BATCHES], "cifar-10-batches-py": _BATCHES},
    {
        "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    },
    1,
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
    ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
)
CIFAR100 = CifarDataset(
    "cifar100",
    "CIFAR-100",
    {"cifar-100-binary": ("train.bin", "test.bin"), "cifar-100-python": ("train", "test")},
    {
        "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
    },
    2,
    (0.5071, 0.4865, 0.4409),
    (0.2673, 0.2564, 0.2762),
    _FINE.split(),
)

CifarPart = tuple[Tensor, Tensor]
"""uint8 images [n, 3, 32, 32] and int64 labels [n]."""


def load(root: Path, dataset: CifarDataset = CIFAR10, augment: bool | str = True) -> LabelledImages:
    """Return a dataset from `root`, normalized per channel.

    `root` holds a folder of `dataset.folders`, such as `cifar-10-batches-bin/`, or one of its
    archives. It may also be one of these itself. An archive is unpacked into a temporary folder.

    Args:
        root: Where the dataset is.
        dataset: The dataset.
        augment: Augment training images with `crop_and_flip`; then also with this method of
            `random_methods`, if it is a name.

    Raises:
        UsageError: A file is missing or damaged, or a pickle or archive is not the published one.
    """
    train, evaluation = _read(root, dataset)
    return LabelledImages(
        dataset.name,
        train,
        evaluation,
        num_classes=len(dataset.classes),
        mean=dataset.mean,
        std=dataset.std,
        classes=dataset.classes,
        augment=augmentation(augment),
    )


def augmentation(augment: bool | str) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return the function that augments a batch; see `load` for the argument."""
    if not isinstance(augment, str):
        return crop_and_flip if augment else None
    method = RandomMethod(augment)
    return lambda images, draws: method.of_batch(crop_and_flip(images, draws), draws)


def is_at(root: Path, dataset: CifarDataset) -> bool:
    """Return whether the folder or file has one of the layouts that `load` reads."""
    return (
        root.name in dataset.archives
        or any((root / name).exists() for name in (*dataset.folders, *dataset.archives))
        or any((root / name).is_file() for names in dataset.folders.values() for name in names)
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


def decode_binary(content: bytes, dataset: CifarDataset) -> CifarPart:
    """Decode records of the label bytes and 3072 pixels (channel, row, column).

    Raises:
        ValueError: The content is not a whole number of records, or a label is out of range.
    """
    size = dataset.label_bytes + PIXELS
    if not content or len(content) % size:
        raise ValueError(f"{len(content)} bytes are not a whole number of {size}-byte records")
    records = torch.from_numpy(np.frombuffer(content, np.uint8).copy()).view(-1, size)
    labels = records[:, dataset.label_bytes - 1]
    if labels.max() >= len(dataset.classes):
        raise ValueError(f"a label is not in 0..{len(dataset.classes) - 1}")
    return records[:, dataset.label_bytes :].reshape(-1, 3, 32, 32), labels.long()


def _read(root: Path, dataset: CifarDataset) -> tuple[CifarPart, CifarPart]:
    """Return the training and the evaluation images of the first layout that `root` has."""
    binary, python = dataset.folders
    for folder, archive in zip(dataset.folders, dataset.archives, strict=True):
        for place in (root / folder, root):
            if any((place / name).is_file() for name in dataset.folders[folder]):
                read = _read_python if folder == python else _read_binary
                return read(place, dataset)
        for place in (root / archive, root):
            if place.name == archive and place.is_file():
                return _read_archive(place, dataset)
    first = dataset.folders[binary][0]
    raise UsageError(
        f"no {dataset.title} in {root}: expected {root}/{binary}/{first} (or {python}/, "
        f"{', '.join(dataset.archives)}); download one from "
        "https://www.cs.toronto.edu/~kriz/cifar.html"
    )


def _read_binary(folder: Path, dataset: CifarDataset) -> tuple[CifarPart, CifarPart]:
    parts = []
    for path in (folder / name for name in next(iter(dataset.folders.values()))):
        if not path.is_file():
            raise UsageError(
                f"{dataset.title}: {folder} lacks the file {path.name}. Unpack the archive again"
            )
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{dataset.title}: {path} is too large to be the published file")
        try:
            parts.append(decode_binary(path.read_bytes(), dataset))
        except ValueError as error:
            raise UsageError(
                f"{dataset.title}: {path.name} in {folder} is damaged: {error}"
            ) from error
    *train, evaluation = parts
    images, labels = zip(*train, strict=True)
    return (torch.cat(images), torch.cat(labels)), evaluation


def _read_python(folder: Path, dataset: CifarDataset) -> tuple[CifarPart, CifarPart]:
    from torchvision import datasets as published
    from torchvision.datasets.utils import check_integrity

    reader = getattr(published, dataset.title.replace("-", ""))
    # The folder may have any name.
    own: Any = type("PublishedFiles", (reader,), {"base_folder": ""})
    try:
        splits = [own(folder, train) for train in (True, False)]
    except RuntimeError:
        meta = reader.meta
        files = [*reader.train_list, *reader.test_list, (meta["filename"], meta["md5"])]
        bad = next(name for name, md5 in files if not check_integrity(folder / name, md5))
        what = (
            "is not the published file: its MD5 is wrong"
            if (folder / bad).exists()
            else "is missing"
        )
        raise UsageError(
            f"{dataset.title}: {folder / bad} {what}. Unpack the archive again"
        ) from None
    train, evaluation = (
        (torch.from_numpy(d.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(d.targets))
        for d in splits
    )
    return train, evaluation


def _read_archive(archive: Path, dataset: CifarDataset) -> tuple[CifarPart, CifarPart]:
    from torchvision.datasets.utils import check_integrity

    if not check_integrity(archive, dataset.archives[archive.name]):
        raise UsageError(
            f"{dataset.title}: {archive} is not the published archive: its MD5 is wrong. Download "
            "it again"
        )
    with tempfile.TemporaryDirectory() as unpacked, tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
        return _read(Path(unpacked), dataset)
