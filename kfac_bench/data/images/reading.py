"""Photographs in files: `ImageData`, for folders of images and for tar shards.

Worker processes read, decode, crop and flip the images. Batches are uint8 until `prepare`.
"""

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset
from torchvision.io import ImageReadMode, decode_jpeg

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import Data, ImageDisplay
from kfac_bench.data.base.files import Faults, Unreadable
from kfac_bench.data.base.in_memory import Normalize
from kfac_bench.data.base.loader import Sample, load_batches
from kfac_bench.data.base.order import Shard, eval_indices, keyed_generator, mixed_seed
from kfac_bench.data.images.opening import open_image, rgb, upright
from kfac_bench.data.images.random_methods import RandomMethod
from kfac_bench.errors import UsageError

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
EVAL_RESIZE = 256 / 224
"""The shorter side of an evaluation image before the centre crop, in units of the crop."""
AREA = (0.08, 1.0)
"""Smallest and largest share of the image that a random crop covers."""
RATIO = (3 / 4, 4 / 3)
"""Smallest and largest ratio of width to height of a random crop."""
ATTEMPTS = 10
"""Number of random crops to try before the central crop is taken."""
MOST_CLASSES = 1_000_000
"""Classes of a dataset whose labels are numbers."""

Box = tuple[int, int, int, int]
"""Left, top, right, bottom, in pixels."""


class Source(Protocol):
    """Encoded images with labels, in files of any kind. Each worker gets a copy of the source."""

    @property
    def labels(self) -> Sequence[int]:
        """Labels of all images."""
        ...

    @property
    def faults(self) -> list[Unreadable]:
        """Faults found when the source was opened."""
        ...

    def name(self, index: int) -> str:
        """Return the path of the image, for messages."""
        ...

    def read(self, index: int) -> bytes:
        """Return the encoded image, or raise OSError."""
        ...

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield bytes that identify the images and labels; see `Data.fingerprint_parts`."""
        ...


class ImageData(Data):
    """A dataset of photographs: uint8 images [n, 3, size, size] and int64 labels [n].

    With `augment`, training images are cropped at random (`random_box`), resized and flipped; a
    name of `random_methods` changes them further. These changes depend only on (seed, epoch, index
    of the image). All other images are cropped in the centre (`centre_box`). `prepare` normalizes
    by ImageNet's mean and standard deviation.

    Each epoch starts `workers` processes, which end with the epoch; with 0 this process decodes.
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
        *,
        augment: bool | str = True,
    ) -> None:
        if image_size < 1 or workers < 0:
            raise UsageError(
                "data.image_size must be at least 1 and data.workers at least 0, "
                f"got {image_size} and {workers}"
            )
        self.name = name
        self.shape: tuple[int, ...] = (3, image_size, image_size)
        self.num_classes = num_classes
        self.train_size = len(train.labels)
        self.eval_size = len(evaluation.labels)
        self.faults = faults
        self.looks = ImageDisplay(MEAN, STD, classes)
        self._train = train
        self._evaluation = evaluation
        self._workers = workers
        self._augment = augment
        self._normalize = Normalize(MEAN, STD)

    def training_batches(self, indices: Iterator[Tensor], key: tuple[int, int]) -> Iterator[Batch]:
        """Yield (images, labels); see `Data.training_batches`."""
        own_key = key if self._augment else None
        method = RandomMethod(self._augment) if isinstance(self._augment, str) else None
        return self._batches(_Samples(self._train, self.shape[1], own_key, method), indices)

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's evaluation batches; see `Data.evaluate`."""
        indices = eval_indices(self.eval_size, batch_size, shard)
        return self._batches(_Samples(self._evaluation, self.shape[1]), indices)

    def prepare(self, batch: Batch) -> Batch:
        """Normalize the images."""
        return self._normalize(batch[0]), *batch[1:]

    def fingerprint_parts(self, split: str) -> Iterable[bytes]:
        """Yield bytes that identify the images and labels; see `Data.fingerprint_parts`."""
        return (self._train if split == "train" else self._evaluation).fingerprint_parts()

    def _batches(self, samples: "_Samples", indices: Iterator[Tensor]) -> Iterator[Batch]:
        images = torch.empty(0, *self.shape, dtype=torch.uint8)
        empty = images, torch.empty(0, dtype=torch.int64)
        return load_batches(samples, indices, self._workers, empty, self.faults)


class _Samples(Dataset[Sample]):
    """Samples (image, label). With a key they are augmented, as a function of key and index."""

    def __init__(
        self,
        source: Source,
        size: int,
        key: tuple[int, int] | None = None,
        method: RandomMethod | None = None,
    ) -> None:
        self.source, self.size, self.key, self.method = source, size, key, method

    def __getitem__(self, index: int) -> Sample:
        if self.key is None:
            image = load(self.source, index, self.size)
        else:
            draws = torch.rand(2 + 4 * ATTEMPTS, generator=keyed_generator(*self.key, index))
            image = load(self.source, index, self.size, draws.tolist())
        if isinstance(image, Unreadable):
            return image
        if self.key is not None and self.method is not None:
            # The numbers (seed, epoch, index) alone have chosen the crop.
            image = self.method(image, mixed_seed(*self.key, index, 1))
        return image, self.source.labels[index]


def load(
    source: Source, index: int, size: int, draws: Sequence[float] | None = None
) -> Tensor | Unreadable:
    """Read, decode and crop an image: uint8 [3, size, size].

    `draws` are the random numbers in [0, 1) of a training image: the first one decides whether to
    flip, the others choose the crop. Without `draws` the crop is the centre.
    """
    try:
        pixels = decode(source.read(index))
    # Pillow raises exceptions of many types for a damaged file.
    except Exception as error:
        return Unreadable.because(source.name(index), error)
    height, width = pixels.shape[1:]
    left, top, right, bottom = (
        centre_box(width, height) if draws is None else random_box(width, height, draws[1:])
    )
    part = pixels[None, :, top:bottom, left:right]
    cut = functional.interpolate(part, (size, size), mode="bilinear", antialias=True)[0]
    return (cut.flip(2) if draws is not None and draws[0] < 0.5 else cut).contiguous()


def decode(content: bytes) -> Tensor:
    """Return the upright pixels of an image file, uint8 [3, H, W]. Raise if it is damaged.

    torchvision decodes JPEG files faster than Pillow; the pixels differ only by rounding. The
    header is read first, because images of absurd sizes are refused. Pillow also decodes all files
    that torchvision cannot decode, and its errors explain what is wrong with a damaged file.
    """
    with open_image(io.BytesIO(content)) as image:
        if image.format == "JPEG":
            with suppress(RuntimeError):
                encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                pixels: Tensor = decode_jpeg(
                    encoded, ImageReadMode.RGB, apply_exif_orientation=True
                )
                return pixels
        return torch.from_numpy(upright(image, rgb(image))).permute(2, 0, 1)


def random_box(width: int, height: int, draws: Sequence[float]) -> Box:
    """Return a random crop of an image, as in GoogLeNet (Szegedy et al. 2015, section 6).

    AREA and RATIO bound the crop. Each attempt uses 4 of the `draws` in [0, 1). If no attempt gives
    a crop that fits into the image, the result is the largest central crop within RATIO.
    """
    low, high = (math.log(ratio) for ratio in RATIO)
    for i in range(ATTEMPTS):
        # The logarithm of the ratio is uniform: 3/4 and 4/3 are equally likely.
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
    """Return the central square crop; its side is 224/256 of the shorter side of the image."""
    side = max(1, round(min(width, height) / EVAL_RESIZE))
    x, y = (width - side) // 2, (height - side) // 2
    return x, y, x + side, y + side


def scan(sources: Mapping[str, Source]) -> tuple[dict[str, int], list[Unreadable]]:
    """Decode every image of each split. Return the number of good images by split, and all faults.

    `kfac-data verify` calls this function.
    """
    counts: dict[str, int] = {}
    faults: list[Unreadable] = []
    for split, source in sources.items():
        decoded = (load(source, i, 1) for i in range(len(source.labels)))
        bad = [image for image in decoded if isinstance(image, Unreadable)]
        counts[split] = len(source.labels) - len(bad)
        faults += source.faults + bad
    return counts, faults
