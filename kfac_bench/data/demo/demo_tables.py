"""Demo: scikit-learn's digits, and Python's documentation, as Parquet files of a hub."""

import io
from pathlib import Path
from typing import Any

from PIL import Image

from kfac_bench.data.base import tables
from kfac_bench.data.base.order import Shard
from kfac_bench.data.demo import demo_language
from kfac_bench.data.images import digits
from kfac_bench.errors import UsageError

SIDE = 32
"""Pixels of a side of an image."""


def make_images(root: Path) -> None:
    """Write `root/data/train-*.parquet` and `test-*.parquet` with PNG images of digits.

    The split is the one of data=digits: 1347 images for training and 450 for evaluation. Raise
    UsageError if there are tables already.
    """
    data = digits.load(SIDE, normalize=False)
    [train] = data.train(data.train_size, 0, 0, 0, Shard())
    [evaluation] = data.evaluate(data.eval_size, Shard())
    for split, (images, labels) in {"train": train, "test": evaluation}.items():
        pixels = (images[:, 0].clamp(0, 1) * 255).byte().numpy()
        cells = [{"bytes": _png(image), "path": f"{i}.png"} for i, image in enumerate(pixels)]
        _write(root, split, {"image": cells, "label": labels.tolist()})


def make_text(root: Path) -> None:
    """Write `root/data/train-*.parquet` with a text for each module of Python's library.

    Raise UsageError if there are tables already.
    """
    _write(root, "train", {"text": [document.text for document in demo_language.documents()]})


def _write(root: Path, split: str, columns: dict[str, list[Any]]) -> None:
    pyarrow = tables.package()
    path = root / "data" / f"{split}-00000-of-00001.parquet"
    if path.exists():
        raise UsageError(f"{path} exists already. Choose another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def _png(pixels: Any) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()
