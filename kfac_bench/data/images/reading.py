"""Photographs in files: read, decoded, cropped and flipped by worker processes; uint8 batches."""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset
from torchvision.io import ImageReadMode, decode_jpeg

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import Data, Looks
from kfac_bench.data.base.loader import Sample, load_batches
from kfac_bench.data.base.normalize import Normalize
from kfac_bench.data.base.order import Shard, eval_indices, keyed_generator
from kfac_bench.data.base.unreadable import Faults, Unreadable
from kfac_bench.errors import UsageError

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
EVAL_RESIZE = 256 / 224
"""The shorter side of an evaluation image before the centre crop, in units of the crop."""
AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
ATTEMPTS = 10

Box = tuple[int, int, int, int]
"""Left, top, right, bottom, in pixels."""


class Source(Protocol):
    """Encoded images with labels, wherever they lie. Workers get a copy of it."""

    @property
    def labels(self) -> Sequence[int]:
        """Of all images, by index."""
        ...

    def name(self, index: int) -> str:
        """What the user knows the image by: a path."""
        ...

    def read(self, index: int) -> bytes:
        """The encoded image. Raises OSError."""
        ...


class ImageData(Data):
    """Two sources as `Data`: uint8 images [n, 3, size, size] and int64 labels [n].

    Training images are cropped at random (`random_box`), resized and flipped, as a function of
    (seed, epoch, index of the image) alone; evaluation images are cropped in the centre
    (`centre_box`). `prepare` normalises by ImageNet's mean and standard deviation. Each epoch
    starts `workers` processes of its own, which end with it (0: this process decodes). Raises
    UsageError for a size below 1 or a negative number of workers.
    """

    def __init__(
        self,
        name: str,
        train: Source,
        evaluation: Source,
        num_classes: int,
        image_size: int,
        workers: int,
        faults: Faults,
        classes: Sequence[str] = (),
    ) -> None:
        if image_size < 1 or workers < 0:
            raise UsageError(
                "image_size must be at least 1 and workers at least 0, "
                f"got {image_size} and {workers}"
            )
        self.name = name
        self.shape: tuple[int, ...] = (3, image_size, image_size)
        self.num_classes = num_classes
        self.train_size = len(train.labels)
        self.eval_size = len(evaluation.labels)
        self.faults = faults
        self.looks = Looks(MEAN, STD, classes)
        self._train = train
        self._evaluation = evaluation
        self._workers = workers
        self._normalize = Normalize(MEAN, STD)

    def training_batches(self, indices: Iterator[Tensor], key: tuple[int, int]) -> Iterator[Batch]:
        """Yield (images, labels), augmented."""
        return self._batches(_Samples(self._train, self.shape[1], key), indices)

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's evaluation batches; see Data.evaluate."""
        indices = eval_indices(self.eval_size, batch_size, shard)
        return self._batches(_Samples(self._evaluation, self.shape[1]), indices)

    def prepare(self, batch: Batch) -> Batch:
        """Normalise the images."""
        return self._normalize(batch[0]), *batch[1:]

    def _batches(self, samples: "_Samples", indices: Iterator[Tensor]) -> Iterator[Batch]:
        images = torch.empty(0, *self.shape, dtype=torch.uint8)
        empty = images, torch.empty(0, dtype=torch.int64)
        return load_batches(samples, indices, self._workers, empty, self.faults)


class _Samples(Dataset[Sample]):
    """(image, label); with a key, a pure function of key and index."""

    def __init__(self, source: Source, size: int, key: tuple[int, int] | None = None) -> None:
        self.source, self.size, self.key = source, size, key

    def __getitem__(self, index: int) -> Sample:
        if self.key is None:
            image = load(self.source, index, self.size)
        else:
            draws = torch.rand(2 + 4 * ATTEMPTS, generator=keyed_generator(*self.key, index))
            image = load(self.source, index, self.size, draws.tolist())
        if isinstance(image, Unreadable):
            return image
        return image, self.source.labels[index]


def load(
    source: Source, index: int, size: int, draws: Sequence[float] | None = None
) -> Tensor | Unreadable:
    """Read, decode and crop an image: uint8 [3, size, size].

    With `draws`, uniform in [0, 1), for training: the first one flips, the others choose the box.
    """
    try:
        pixels = decode(source.read(index))
    except Exception as error:  # a damaged image makes Pillow raise nearly anything
        return Unreadable(source.name(index), " ".join(str(error).split()) or type(error).__name__)
    height, width = pixels.shape[1:]
    left, top, right, bottom = (
        centre_box(width, height) if draws is None else random_box(width, height, draws[1:])
    )
    part = pixels[None, :, top:bottom, left:right]
    cut = functional.interpolate(part, (size, size), mode="bilinear", antialias=True)[0]
    return (cut.flip(2) if draws is not None and draws[0] < 0.5 else cut).contiguous()


def decode(content: bytes) -> Tensor:
    """An image file's pixels, uint8 [3, H, W]. Raises anything for what is no whole image.

    torchvision decodes a JPEG in less time than Pillow, to the same pixels but for rounding.
    Pillow looks at the header first, for it refuses images of absurd sizes; it decodes whatever
    torchvision does not, and says what is wrong with a damaged one.
    """
    with Image.open(io.BytesIO(content)) as image:
        if image.format == "JPEG":
            with suppress(RuntimeError):
                encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                pixels: Tensor = decode_jpeg(encoded, ImageReadMode.RGB)
                return pixels
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def random_box(width: int, height: int, draws: Sequence[float]) -> Box:
    """A random part of the image, as GoogLeNet was trained with (Szegedy et al. 2015, section 6).

    Its area is a share in AREA of the image's, its ratio of width to height in RATIO, both drawn
    until the box fits; after ATTEMPTS the central one is taken that comes nearest. Takes 4
    `draws` in [0, 1) an attempt.
    """
    low, high = (math.log(ratio) for ratio in RATIO)
    for i in range(ATTEMPTS):
        share, ratio, left, top = draws[4 * i : 4 * i + 4]
        area = width * height * (AREA[0] + share * (AREA[1] - AREA[0]))
        aspect = math.exp(low + ratio * (high - low))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            x, y = math.floor(left * (width - w + 1)), math.floor(top * (height - h + 1))
            return x, y, x + w, y + h
    w = max(1, min(width, round(height * RATIO[1])))
    h = max(1, min(height, round(width / RATIO[0])))
    x, y = (width - w) // 2, (height - h) // 2
    return x, y, x + w, y + h


def centre_box(width: int, height: int) -> Box:
    """The central square of 224/256 of the shorter side."""
    side = max(1, round(min(width, height) / EVAL_RESIZE))
    x, y = (width - side) // 2, (height - side) // 2
    return x, y, x + side, y + side


def check(source: Source, index: int) -> Unreadable | None:
    """Decode the image: what is wrong with it."""
    image = load(source, index, 1)
    return image if isinstance(image, Unreadable) else None
