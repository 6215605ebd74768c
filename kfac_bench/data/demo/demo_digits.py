"""Demos: scikit-learn's digits in the layouts of CIFAR-10's binary version and of Fashion-MNIST."""

from pathlib import Path

import torch

from kfac_bench.data.base.order import Shard
from kfac_bench.data.images import cifar10, digits, fashion_mnist
from kfac_bench.errors import UsageError


def make_cifar10(root: Path) -> None:
    """Write `root/cifar-10-batches-bin` with grey digits of 32 x 32 pixels.

    The split is the one of data=digits: 1347 images for training, in five files, and 450 for
    evaluation. Raise UsageError if the folder exists already.
    """
    folder = root / next(iter(cifar10.FOLDERS))
    if folder.exists():
        raise UsageError(f"{folder} exists already. Choose another folder")
    data = digits.load(32, normalize=False)
    [train] = data.train(data.train_size, 0, 0, 0, Shard())
    [evaluation] = data.evaluate(data.eval_size, Shard())
    images, labels = (x.chunk(len(cifar10.BINARY) - 1) for x in train)
    parts = [*zip(images, labels, strict=True), evaluation]
    folder.mkdir(parents=True)
    for name, (grey, digit) in zip(cifar10.BINARY, parts, strict=True):
        pixels = (grey.clamp(0, 1) * 255).round().to(torch.uint8).expand(-1, 3, -1, -1).flatten(1)
        records = torch.cat([digit[:, None].to(torch.uint8), pixels], dim=1)
        (folder / name).write_bytes(records.numpy().tobytes())


def make_fashion_mnist(root: Path) -> None:
    """Write the four files into `root`, with grey digits of 28 x 28 pixels.

    The split is the one of data=digits: 1347 images for training and 450 for evaluation. Raise
    UsageError if the folder has one of the files already.
    """
    if fashion_mnist.is_at(root):
        raise UsageError(f"{root} has files of this dataset already. Choose another folder")
    data = digits.load(fashion_mnist.SIDE, normalize=False)
    [train] = data.train(data.train_size, 0, 0, 0, Shard())
    [evaluation] = data.evaluate(data.eval_size, Shard())
    root.mkdir(parents=True, exist_ok=True)
    for begin, (grey, labels) in zip(
        fashion_mnist.SPLITS.values(), (train, evaluation), strict=True
    ):
        pixels = (grey[:, 0].clamp(0, 1) * 255).round().to(torch.uint8)
        arrays = {"images": pixels, "labels": labels.to(torch.uint8)}
        for kind, array in arrays.items():
            fashion_mnist.write(root / f"{begin}{fashion_mnist.ENDS[kind]}.gz", array.numpy())
