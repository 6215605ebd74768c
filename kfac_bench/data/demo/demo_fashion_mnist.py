"""Demo: scikit-learn's digits in the layout of MNIST and Fashion-MNIST."""

from pathlib import Path

import torch

from kfac_bench.data.base.order import Shard
from kfac_bench.data.images import digits, idx_images
from kfac_bench.errors import UsageError


def make(root: Path) -> None:
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
