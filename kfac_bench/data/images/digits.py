"""Reading scikit-learn's handwritten digits: real images on every machine, without a download."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.random import RandomState
from numpy.typing import NDArray
from torch.nn import functional

from kfac_bench.data.base.in_memory import LabelledImages
from kfac_bench.errors import UsageError

EVAL_SIZE = 450


def load(image_size: int = 8, normalize: bool = True) -> LabelledImages:
    """Return the 1797 digits, 1347 for training and 450 for evaluation, as [1, size, size].

    The split is the same for all seeds. Pixels are in [0, 1] (stored value / 16).

    Args:
        image_size: Side in pixels; if it is not 8, the images are resized bilinearly.
        normalize: Whether `prepare` subtracts the mean of the training pixels and divides by their
            standard deviation. Reconstruction needs pixels in [0, 1], because its error is meant
            in pixels.

    Raises:
        UsageError: `image_size` is below 1.
    """
    if image_size < 1:
        raise UsageError(f"data.image_size must be at least 1, got {image_size}")
    pixels, targets = read()
    labels = torch.from_numpy(targets).long()
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16
    if image_size != 8:
        size = (image_size, image_size)
        images = functional.interpolate(images, size=size, mode="bilinear", antialias=True)
    train, held_out = split(targets)
    std, mean = torch.std_mean(images[train].double())
    return LabelledImages(
        "digits",
        (images[train], labels[train]),
        (images[held_out], labels[held_out]),
        num_classes=10,
        mean=[mean.item()] if normalize else None,
        std=[std.item()] if normalize else None,
    )


def read() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return pixels [1797, 64] from 0 to 16, and labels [1797], as scikit-learn's load_digits."""
    table = _table(installed_file("sklearn", "datasets/data/digits.csv.gz", "train"))
    return table[:, :-1].copy(), table[:, -1].astype(np.int64)


@cache
def _table(file: Path) -> NDArray[np.float64]:
    """Read the file once in a process: a sweep trains on it many times."""
    return np.loadtxt(file, delimiter=",")


def split(labels: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Return the indices for training and for evaluation, with equal shares of each class.

    The split equals that of scikit-learn's train_test_split(test_size=EVAL_SIZE, stratify=labels,
    random_state=0), whose random numbers are drawn here in the same order.
    """
    generator = RandomState(0)
    counts = np.bincount(labels)
    train_counts = _draw_counts(counts, len(labels) - EVAL_SIZE, generator)
    eval_counts = _draw_counts(counts - train_counts, EVAL_SIZE, generator)
    # Within a class, a random order decides which examples are held out.
    train, held_out = list[int](), list[int]()
    for label, (n_train, n_eval) in enumerate(zip(train_counts, eval_counts, strict=True)):
        mixed = np.flatnonzero(labels == label)[generator.permutation(counts[label])]
        train += mixed[:n_train].tolist()
        held_out += mixed[n_train : n_train + n_eval].tolist()
    return generator.permutation(train).tolist(), generator.permutation(held_out).tolist()


def _draw_counts(
    counts: NDArray[np.int64], total: int, generator: RandomState
) -> NDArray[np.int64]:
    """Return the number of examples of each class, `total` in all, in proportion to `counts`."""
    exact: NDArray[np.float64] = counts / counts.sum() * total
    result: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    remainders = exact - result
    # The classes with the largest remainders get one more; equal remainders are drawn at random.
    for remainder in np.unique(remainders)[::-1]:
        missing = total - int(result.sum())
        if missing == 0:
            break
        (classes,) = np.where(remainders == remainder)
        result[generator.choice(classes, min(len(classes), missing), replace=False)] += 1
    return result


def installed_file(package: str, path: str, extra: str) -> Path:
    """Return a file of a package. Importing the package would take seconds.

    Args:
        package: Name of the package as it is imported.
        path: The file inside the package.
        extra: The extra of kfac_bench that has the package, for the error message.

    Raises:
        UsageError: The package is not installed, or does not have the file.
    """
    spec = find_spec(package)
    file = Path(spec.origin).parent / path if spec and spec.origin else None
    if file is None or not file.is_file():
        install = f"in your clone of kfac_bench type pip install '.[{extra}]'"
        raise UsageError(f"there is no file {path} of {package}: {install}")
    return file
