"""Reading CIFAR-10 from the published archives: packed or unpacked, binary or Python version."""

import gzip
import io
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kfac_bench.data.base.in_memory import LabelledImages
from kfac_bench.data.images import cifar10_pickle
from kfac_bench.data.unpacked import Unpacked
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
"""The published files have 31 MB. A much larger member of an archive is a decompression bomb."""
MAX_ARCHIVE_BYTES = 256 * 2**20
PUBLISHED = "and the published archives unpack to 185 MB"

CifarPart = tuple[Tensor, Tensor]
"""uint8 images [n, 3, 32, 32] and int64 labels [n]."""


def load(root: Path, augment: bool = True) -> LabelledImages:
    """Return CIFAR-10 from `root`, normalized per channel.

    `root` holds `cifar-10-batches-bin/` or `cifar-10-batches-py/`, or their archives
    `cifar-10-binary.tar.gz` or `cifar-10-python.tar.gz`. It may also be one of these four itself.
    Archives are read in memory and not extracted. Pickles are read without executing anything.

    Args:
        root: Where the dataset is.
        augment: Augment training images with `crop_and_flip`.

    Raises:
        UsageError: A file is missing or damaged.
    """
    files, names, decode = _open(root)
    splits = []
    for name in names:
        if name not in files:
            raise UsageError(f"CIFAR-10: {root} lacks the file {name}. Unpack the archive again")
        try:
            splits.append(decode(files[name]))
        except ValueError as error:
            raise UsageError(f"CIFAR-10: {name} in {root} is damaged: {error}") from error
    return LabelledImages(
        "cifar10",
        (torch.cat([s[0] for s in splits[:-1]]), torch.cat([s[1] for s in splits[:-1]])),
        splits[-1],
        num_classes=10,
        mean=MEAN,
        std=STD,
        classes=CLASSES,
        augment=crop_and_flip if augment else None,
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


def decode_python(content: bytes) -> CifarPart:
    """Decode a pickled dict of `data` (uint8 [n, 3072]) and `labels` (list of n integers).

    Raises:
        ValueError: The pickle is damaged, has other content, or would execute something.
    """
    batch = cifar10_pickle.loads(content)
    if not isinstance(batch, dict):
        raise ValueError("it is not a dictionary")
    # Python 2 wrote the published files, so their keys are bytes. Python 3 writes strings.
    data = cifar10_pickle.uint8_array(batch.get(b"data", batch.get("data")))
    labels = batch.get(b"labels", batch.get("labels"))
    if data.ndim != 2 or data.shape[1] != PIXELS:
        raise ValueError(f"data has the shape {data.shape}, not (n, {PIXELS})")
    if not isinstance(labels, list) or not all(label in range(10) for label in labels):
        raise ValueError("labels is not a list of integers in 0..9")
    if not 0 < len(data) == len(labels):
        raise ValueError(f"{len(data)} images have {len(labels)} labels")
    images = torch.from_numpy(np.ascontiguousarray(data).copy()).view(-1, 3, 32, 32)
    return images, torch.tensor(labels, dtype=torch.int64)


PYTHON = (
    "data_batch_1",
    "data_batch_2",
    "data_batch_3",
    "data_batch_4",
    "data_batch_5",
    "test_batch",
)
BINARY = tuple(f"{name}.bin" for name in PYTHON)
FORMATS: tuple[tuple[str, str, tuple[str, ...], Callable[[bytes], CifarPart]], ...] = (
    ("cifar-10-batches-bin", "cifar-10-binary.tar.gz", BINARY, decode_binary),
    ("cifar-10-batches-py", "cifar-10-python.tar.gz", PYTHON, decode_python),
)
"""Of each version: folder, archive, file names (the last one is for evaluation) and decoder."""


def _open(root: Path) -> tuple[dict[str, bytes], tuple[str, ...], Callable[[bytes], CifarPart]]:
    """Find the data. Return the contents by file name, the names of all files, and the decoder."""
    for folder, archive, names, decode in FORMATS:
        for place in (root / folder, root):
            if any((place / name).is_file() for name in names):
                return _read_folder(place, names), names, decode
        for place in (root / archive, root):
            if place.name == archive and place.is_file():
                return _read_archive(place, folder, names), names, decode
    raise UsageError(
        f"no CIFAR-10 in {root}: expected {root}/cifar-10-batches-bin/data_batch_1.bin (or "
        "cifar-10-batches-py/, cifar-10-binary.tar.gz, cifar-10-python.tar.gz); "
        "download one from https://www.cs.toronto.edu/~kriz/cifar.html"
    )


def _read_folder(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    paths = [folder / name for name in names]
    for path in paths:
        if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"CIFAR-10: {path} is too large to be the published file")
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def _read_archive(archive: Path, folder: str, names: tuple[str, ...]) -> dict[str, bytes]:
    """Read the files of the dataset into memory. Nothing is written to disk."""
    wanted = {f"{folder}/{name}": name for name in names}
    files: dict[str, bytes] = {}
    try:
        with (
            gzip.open(archive) as packed,
            io.BufferedReader(Unpacked(packed, MAX_ARCHIVE_BYTES, PUBLISHED)) as plain,
            tarfile.open(fileobj=plain, mode="r|") as tar,
        ):
            for member in tar:
                name = wanted.get(member.name.removeprefix("./"))
                if name is None or not member.isreg():
                    continue
                if member.size > MAX_FILE_BYTES:
                    raise UsageError(f"CIFAR-10: {archive} holds a {name} of {member.size} bytes")
                content = tar.extractfile(member)
                files[name] = content.read() if content else b""
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise UsageError(f"CIFAR-10: {archive} is damaged: {error}. Download it again") from error
    return files
