"""Images with boxes and masks of the objects in them, in COCO's layout.

`annotations/instances_{train,val}<year>.json` and the image folders `train<year>/`, `val<year>/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import Data, ImageDisplay, of_files
from kfac_bench.data.base.files import Faults, Unreadable, summary
from kfac_bench.data.base.loader import Sample, load_batches
from kfac_bench.data.base.order import Shard, eval_indices, keyed_generator
from kfac_bench.data.images.coco_annotations import AnnotationFile, CocoImage, find, years
from kfac_bench.data.images.coco_annotations import load as load_annotations
from kfac_bench.data.images.coco_masks import api, decode
from kfac_bench.data.images.opening import open_image, rgb, upright
from kfac_bench.errors import UsageError
from kfac_bench.output import counted

Target = dict[str, Tensor]
"""The content of one image: `image_id`, and in training the n objects.

The objects are `boxes` float32 [n, 4] (x1, y1, x2, y2 in pixels), `labels` int64 [n] from 1 on, and
`masks` uint8 [n, H, W] of 0 and 1."""


def load(
    root: Path,
    image_size: int = 800,
    max_size: int = 1333,
    workers: int = 0,
    *,
    min_sizes: Sequence[int] = (),
    augment: bool = True,
    on_error: str = "fatal",
    year: int | None = None,
) -> COCO:
    """Open the training and the validation set in `root`; no image is read yet.

    Training leaves out crowds, and images that have nothing else. Evaluation images keep their
    size: the model resizes them to `image_size` and `max_size`, and its detections back.

    Args:
        root: Folder of the dataset.
        image_size: Shorter side of an image in pixels.
        max_size: Largest longer side in pixels; a longer image gets a smaller shorter side.
        workers: Processes per rank that read ahead.
        min_sizes: Shorter sides in training. Each epoch draws one of them for each image. Empty
            means `image_size`.
        augment: Mirror half of the training images.
        on_error: What happens to images and annotations with errors (see `coco_annotations.load`)
            and to images that cannot be decoded. "fatal": UsageError. "skip": they are left out of
            both sets and listed in `faults`. The evaluator still counts the objects of an image
            that cannot be decoded, as not detected.
        year: Which year to take, if the folder has several.
    """
    # Without this call a missing pycocotools would be noticed only hours later.
    api()
    least = min((image_size, *min_sizes))
    if least < 1 or max_size < max((image_size, *min_sizes)) or workers < 0:
        raise UsageError(
            f"data.image_size and data.min_sizes must be between 1 and data.max_size={max_size}, "
            f"data.workers at least 0; got {[image_size, *min_sizes]} and {workers}"
        )
    train, evaluation = (load_annotations(*find(root, split, year)) for split in ("train", "val"))
    if train.categories != evaluation.categories:
        raise UsageError(f"{train.file} and {evaluation.file} have different categories")
    faults = Faults(skip=on_error == "skip")
    faults.add_all(root, train.faults + evaluation.faults)
    used = [image for image in train.images if image.objects]
    unused = len(train.images) - len(used)
    for content in (train, evaluation):
        if not any(image.objects for image in content.images):
            raise UsageError(
                f"{content.file} has no image with objects to learn from: {_why(content)}"
            )
    return COCO(
        used,
        evaluation,
        (3, image_size, max_size),
        tuple(min_sizes) or (image_size,),
        workers,
        augment,
        faults,
        [f"{unused} images of {train.file} have no objects to learn from: left out"]
        if unused
        else [],
    )


def _why(content: AnnotationFile) -> str:
    """Return why no image has an object to learn from."""
    if content.faults:
        return summary(content.faults)
    crowds = sum(len(image.instances) for image in content.images)
    if crowds:
        return f"all {counted(crowds, 'annotation')} are crowds (iscrowd is 1)"
    return f"it has no annotations, and {counted(len(content.images), 'image')}"


def scan(root: Path) -> tuple[dict[str, int], list[Unreadable]]:
    """Decode every image of every year. Return the number of good images by split, and all faults.

    Raises:
        UsageError: As in `load`.
    """
    counts: dict[str, int] = {}
    faults: list[Unreadable] = []
    for split in ("train", "val"):
        found = years(root, split)
        for year in found or [""]:
            content = load_annotations(*find(root, split, year))
            decoded = (_decode(image) for image in content.images)
            bad = [x for x in decoded if isinstance(x, Unreadable)]
            name = f"{split} of {year}" if len(found) > 1 else split
            counts[name] = len(content.images) - len(bad)
            faults += content.faults + bad
    return counts, faults


def _decode(image: CocoImage) -> NDArray[np.uint8] | Unreadable:
    """Return the pixels [H, W, 3] of an image, or the reason why it cannot be read.

    The pixels are upright, unless only the stored pixels have the size in the annotations.
    """
    try:
        with open_image(image.path) as file:
            stored = rgb(file)
            pixels = upright(file, stored)
    # Pillow raises exceptions of many types for a damaged file.
    except Exception as error:
        return Unreadable.because(image.path, error)
    size = image.height, image.width
    if pixels.shape[:2] != size and stored.shape[:2] == size:
        return stored
    if pixels.shape[:2] != size:
        height, width = pixels.shape[:2]
        return Unreadable(
            str(image.path),
            f"it has {width} x {height} pixels, its annotations say {image.width} x {image.height}",
        )
    return pixels


class COCO(Data):
    """The dataset. Batches are (list of images, list of targets).

    Images are float32 [3, H, W] in [0, 1], each of its own size. Targets are of type `Target`.
    `truth` are the evaluation images with their objects, for the evaluator.
    """

    def __init__(
        self,
        train: Sequence[CocoImage],
        evaluation: AnnotationFile,
        shape: tuple[int, ...],
        min_sizes: Sequence[int],
        workers: int,
        augment: bool,
        faults: Faults,
        notes: Sequence[str],
    ) -> None:
        self.name = "coco"
        self.shape = shape
        self.num_classes = 1 + len(evaluation.categories)
        self.train_size = len(train)
        self.eval_size = len(evaluation.images)
        self.truth: Sequence[CocoImage] = evaluation.images
        classes = ("nothing", *evaluation.categories.values())
        self.looks = ImageDisplay((0.0,) * 3, (1.0,) * 3, classes)
        self.faults = faults
        self.notes = notes
        self._train = train
        self._min_sizes = min_sizes
        self._workers = workers
        self._augment = augment

    def training_batches(self, indices: Iterator[Tensor], key: tuple[int, int]) -> Iterator[Batch]:
        """Yield (images, targets); size and mirroring of an image depend only on key and index."""
        samples = _TrainingSamples(self._train, self._min_sizes, self.shape[2], self._augment, key)
        return load_batches(samples, indices, self._workers, ([], []), self.faults, _lists)

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's images and their ids; see `Data.evaluate`.

        A rank's batch has one image, whatever `batch_size` says. Several images would be padded to
        a common size, and the detections in one image would depend on the others.
        """
        indices = eval_indices(self.eval_size, shard.world_size, shard)
        samples = _EvaluationSamples(self.truth)
        return load_batches(samples, indices, self._workers, ([], []), self.faults, _lists)

    def fingerprint_parts(self, split: str) -> Iterator[bytes]:
        """Yield names and sizes of images, boxes and areas; see `Data.fingerprint_parts`."""
        images: Sequence[CocoImage] = self._train if split == "train" else self.truth
        yield from of_files([image.path for image in images], images[0].path.parent)
        # JSON may contain halves of characters, which strict UTF-8 refuses.
        yield "\n".join(self.looks.classes).encode("utf-8", "surrogatepass")
        for image in images:
            # Not the polygons: they are long, and another mask has another area.
            objects = [(x.bbox, x.label, x.area, x.crowd) for x in image.instances]
            yield repr((image.id, image.height, image.width, objects)).encode()


def _lists(samples: list[Any]) -> Batch:
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


class _EvaluationSamples(Dataset[Sample]):
    """Samples (image, target) of the size on disk."""

    def __init__(self, images: Sequence[CocoImage]) -> None:
        self.images = images

    def __getitem__(self, index: int) -> Sample:
        pixels = _decode(self.images[index])
        if isinstance(pixels, Unreadable):
            return pixels
        return _to_tensor(pixels), {"image_id": torch.tensor(self.images[index].id)}


class _TrainingSamples(Dataset[Sample]):
    """Samples (image, target), resized and perhaps mirrored as a function of key and index."""

    def __init__(
        self,
        images: Sequence[CocoImage],
        min_sizes: Sequence[int],
        max_size: int,
        augment: bool,
        key: tuple[int, int],
    ) -> None:
        self.images, self.min_sizes, self.max_size = images, min_sizes, max_size
        self.augment, self.key = augment, key

    def __getitem__(self, index: int) -> Sample:
        record = self.images[index]
        pixels = _decode(record)
        if isinstance(pixels, Unreadable):
            return pixels
        height, width, objects = record.height, record.width, record.objects
        masks = torch.from_numpy(decode([x.segmentation for x in objects], height, width))
        boxes = torch.tensor([x.corners(height, width) for x in objects], dtype=torch.float32)
        generator = keyed_generator(*self.key, index)
        image, boxes, masks = self._augmented(_to_tensor(pixels), boxes, masks, generator)
        return image, {
            "image_id": torch.tensor(record.id),
            "boxes": boxes,
            "labels": torch.tensor([x.label for x in objects]),
            "masks": masks,
        }

    def _augmented(
        self, image: Tensor, boxes: Tensor, masks: Tensor, generator: Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Both numbers are always drawn: `augment` does not change the sizes.
        draw, mirror = torch.rand(2, generator=generator).tolist()
        size = self.min_sizes[int(draw * len(self.min_sizes))]
        sample = resize(image, boxes, masks, size, self.max_size)
        return flip(*sample) if self.augment and mirror < 0.5 else sample


def _to_tensor(pixels: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def resize(
    image: Tensor, boxes: Tensor, masks: Tensor, min_size: int, max_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Resize an image [C, H, W] with its boxes and masks.

    The shorter side becomes `min_size`, or less, so that the longer side is at most `max_size`.
    As in torchvision's detectors, images are interpolated bilinearly, masks take the nearest
    pixel, and sizes are rounded down.
    """
    height, width = image.shape[-2:]
    scale = min(min_size / min(height, width), max_size / max(height, width))
    size = [max(1, int(height * scale)), max(1, int(width * scale))]
    if size != [height, width]:
        image = functional.interpolate(image[None], size, mode="bilinear", align_corners=False)[0]
        masks = functional.interpolate(masks[None], size)[0]
    ratio = torch.tensor([size[1] / width, size[0] / height]).repeat(2)
    return image, boxes * ratio, masks


def flip(image: Tensor, boxes: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mirror an image with its boxes and masks horizontally."""
    x1, y1, x2, y2 = boxes.unbind(1)
    width = image.shape[-1]
    return image.flip(-1), torch.stack([width - x2, y1, width - x1, y2], 1), masks.flip(-1)
