"""Demo: scikit-learn's digits as JPEG files in the layout of ImageNet."""

from pathlib import Path

from PIL import Image

from kfac_bench.data.base.order import Shard
from kfac_bench.data.images import digits
from kfac_bench.errors import UsageError


def make(root: Path, size: int = 64) -> None:
    """Write `root/train/n0000000<digit>/*.JPEG` and `root/val/...`, RGB images of size x size.

    The split is the one of data=digits: 1347 images for training and 450 for evaluation. Raise
    UsageError if one of the folders exists already.
    """
    if any((root / split).exists() for split in ("train", "val")):
        raise UsageError(f"{root} has train or val already. Choose another folder")
    data = digits.load(size, normalize=False)
    splits = {
        "train": data.train(data.train_size, 0, 0, 0, Shard()),
        "val": data.evaluate(data.eval_size, Shard()),
    }
    for split, batches in splits.items():
        images, labels = next(iter(batches))
        for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            folder = root / split / f"n{label:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = (image[0].clamp(0, 1) * 255).byte().numpy()
            path = folder / f"n{label:08d}_{number}.JPEG"
            Image.fromarray(pixels).convert("RGB").save(path, quality=95)
