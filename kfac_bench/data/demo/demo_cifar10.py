"""scikit-learn's digits in the layout of CIFAR-10's binary version: a demo, not CIFAR-10."""

from pathlib import Path

import torch

from kfac_bench.data.base.order import Shard
from kfac_bench.data.images import cifar10, digits
from kfac_bench.errors import UsageError


def make(root: Path) -> None:
    """Write `root/cifar-10-batches-bin`: grey digits of 32 x 32 pixels, the split of data=digits.

    1347 images to train on, in five files, and 450 for evaluation. Raises UsageError if there is
    such a folder already.
    """
    folder = root / cifar10.FORMATS[0][0]
    if folder.exists():
        raise UsageError(f"{folder} is there already: choose another folder")
    data = digits.load(32, normalize=False)
    [train] = data.train(data.train_size, 0, 0, 0, Shard())
    [evaluation] = data.evaluate(data.eval_size, Shard())
    parts = [*zip(*(x.chunk(len(cifar10.BINARY) - 1) for x in train), strict=True), evaluation]
    folder.mkdir(parents=True)
    for name, (images, labels) in zip(cifar10.BINARY, parts, strict=True):
        pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8).expand(-1, 3, -1, -1).flatten(1)
        records = torch.cat([labels[:, None].to(torch.uint8), pixels], dim=1)
        (folder / name).write_bytes(records.numpy().tobytes())
