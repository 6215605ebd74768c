"""Demos: scikit-learn's digits in the layouts of CIFAR's binary versions and of MNIST."""

from pathlib import Path

import torch
from torch import Tensor

from kfac_bench.data.base.order import Shard
from kfac_bench.data.images import digits, idx_images
from kfac_bench.data.images.cifar import CIFAR10, CIFAR100, CifarDataset
from kfac_bench.errors import UsageError


def make_cifar10(root: Path) -> None:
    """Write `root/cifar-10-batches-bin` with grey digits of 32 x 32 pixels.

    The split is the one of data=digits: 1347 images for training, in five files, and 450 for
    evaluation. Raise UsageError if the folder exists already.
    """
    _make(root, CIFAR10)


def make_cifar100(root: Path) -> None:
    """Write `root/cifar-100-binary`, as `make_cifar10`; only the first ten classes have images."""
    _make(root, CIFAR100)


def _make(root: Path, dataset: CifarDataset) -> None:
    name, files = next(iter(dataset.folders.items()))
    folder = root / name
    if folder.exists():
        raise UsageError(f"{folder} exists already. Choose another folder")
    data = digits.load(32, normalize=False)
    [train] = data.train(data.train_size, 0, 0, 0, Shard())
    [evaluation] = data.evaluate(data.eval_size, Shard())
    images, labels = (x.chunk(len(files) - 1) for x in train)
    parts = [*zip(images, labels, strict=True), evaluation]
    folder.mkdir(parents=True)
    for file, (grey, digit) in zip(files, parts, strict=True):
        (folder / file).write_bytes(_records(grey, digit, dataset.label_bytes))


def _records(grey: Tensor, digit: Tensor, label_bytes: int) -> bytes:
    pixels = (grey.clamp(0, 1) * 255).round().to(torch.uint8).expand(-1, 3, -1, -1).flatten(1)
    labels = digit[:, None].to(torch.uint8).expand(-1, label_bytes)
    return torch.cat([labels, pixels], dim=1).numpy().tobytes()


def make_idx_images(root: Path) -> None:
    """Write the four files into `root`, with grey digits of 28 x 28 pixels.

    The split is the one of data=digits: 1347 images for training and 450 for evaluation. Raise
    UsageError if the folder has one of the files already.
    """
    if any(idx_images.path_of(root, name).exists() for name in idx_images.NAMES):
        raise UsageError(f"{root} has files of this dataset already. Choose another folder")
    data = digits.load(idx_images.SIDE, normalize=False)
    [train] = data.train(data.train_size, 0, 0, 0, Shard())
    [evaluation] = data.evaluate(data.eval_size, Shard())
    root.mkdir(parents=True, exist_ok=True)
    for begin, (grey, labels) in zip(idx_images.SPLITS.values(), (train, evaluation), strict=True):
        pixels = (grey[:, 0].clamp(0, 1) * 255).round().to(torch.uint8)
        arrays = {"images": pixels, "labels": labels.to(torch.uint8)}
        for kind, array in arrays.items():
            idx_images.write(root / f"{begin}{idx_images.ENDS[kind]}.gz", array.numpy())
