"""Pictures with boxes and masks of the things in them, in COCO's layout.

`annotations/instances_{train,val}<year>.json` and the image folders `train<year>/`, `val<year>/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Generator, Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import Data, Looks
from kfac_bench.data.base.loader import Sample, load_batches
from kfac_bench.data.base.order import Shard, eval_indices, keyed_generator
from kfac_bench.data.base.unreadable import Faults, Unreadable
from kfac_bench.data.coco.coco_annotations import Fault, Picture, Split, find
from kfac_bench.data.coco.coco_annotations import load as load_split
from kfac_bench.data.coco.coco_masks import api, decode
from kfac_bench.errors import UsageError

Target = dict[str, Tensor]
"""``image_id``; in training also ``boxes`` float32 [n, 4] (x1, y1, x2, y2 in pixels), ``labels``
int64 [n] from 1 on, ``masks`` uint8 [n, H, W] of 0 and 1."""


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
    """Open the training and the validation set below ``root``; no image is read yet.

    Training images are resized so that their shorter side has one of ``min_sizes`` (drawn anew
    each epoch; empty: ``image_size``) pixels, or as many as leave ``max_size`` for the longer one;
    ``augment`` mirrors half of them. Evaluation images keep their size: the model resizes them to
    ``image_size`` and ``max_size``, which are the ``shape``, and its findings back. Crowds are left
    out of training, and with them images that have nothing else.

    What is wrong with single images and annotations (:func:`coco_annotations.load`) is, with
    ``on_error`` "fatal", a UsageError; with "skip" it is left out of both sets and named in
    ``faults``. So is an image that cannot be decoded, when its turn comes; what is in it stays
    in the truth, where it is never found.
    """
    api()  # or pycocotools is missed hours later
    least = min((image_size, *min_sizes))
    if least < 1 or max_size < max((image_size, *min_sizes)) or workers < 0:
        raise UsageError(
            f"data.image_size and data.min_sizes must be between 1 and data.max_size={max_size}, "
            f"workers at least 0, got {[image_size, *min_sizes]} and {workers}"
        )
    train, evaluation = (load_split(*find(root, split, year)) for split in ("train", "val"))
    if train.categories != evaluation.categories:
        raise UsageError(f"{train.file} and {evaluation.file} have other categories")
    faults, found = Faults(skip=on_error == "skip"), [*train.faults, *evaluation.faults]
    faults.add_all(root, [_named(*fault) for fault in found])
    used = [p for p in train.pictures if p.things]
    unused = len(train.pictures) - len(used)
    if not used or not any(p.things for p in evaluation.pictures):
        raise UsageError(f"{root}: training and evaluation need an image with annotations each")
    return COCO(
        used,
        evaluation,
        (3, image_size, max_size),
        tuple(min_sizes) or (image_size,),
        workers,
        augment,
        faults,
        [f"{unused} images of {train.file} have nothing to learn from: left out"] if unused else [],
    )


def _named(file: Path, fault: str) -> Unreadable:
    """A name of its own for each entry of an annotation file."""
    entry, _, reason = fault.partition(": ")
    return Unreadable(f"{file}: {entry}", reason)


def scan(root: Path, year: int | None = None) -> tuple[dict[str, int], list[Fault]]:
    """Decode every image: how many of each set are good, and (file, fault) of all that is not.

    Raises UsageError as :func:`load` does.
    """
    counts: dict[str, int] = {}
    faults: list[Fault] = []
    for name in ("train", "val"):
        split = load_split(*find(root, name, year))
        read = (_decode(picture) for picture in split.pictures)
        bad = [(Path(x.path), x.reason) for x in read if isinstance(x, Unreadable)]
        counts[name] = len(split.pictures) - len(bad)
        faults += [*split.faults, *bad]
    return counts, faults


def _decode(picture: Picture) -> Any:
    """uint8 [H, W, 3], or why there is none."""
    try:
        with Image.open(picture.path) as file:
            pixels = np.array(file.convert("RGB"))
    except Exception as error:  # a damaged file makes Pillow raise nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        return Unreadable(str(picture.path), reason)
    if pixels.shape[:2] != (picture.height, picture.width):
        height, width = pixels.shape[:2]
        return Unreadable(
            str(picture.path),
            f"it has {width} x {height} pixels, its annotations say "
            f"{picture.width} x {picture.height}",
        )
    return pixels


class COCO(Data):
    """The two sets as `Data`: batches are (list of images, list of targets).

    Images are float32 [3, H, W] in [0, 1], each of its own size; a target is a :data:`Target`.
    ``truth`` is what the evaluator compares with.
    """

    def __init__(
        self,
        train: Sequence[Picture],
        evaluation: Split,
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
        self.eval_size = len(evaluation.pictures)
        self.truth: Sequence[Picture] = evaluation.pictures
        self.looks = Looks((0.0,) * 3, (1.0,) * 3, ("nothing", *evaluation.categories.values()))
        self.faults = faults
        self.notes = notes
        self._train = train
        self._min_sizes = min_sizes
        self._workers = workers
        self._augment = augment

    def training_batches(self, indices: Iterator[Tensor], key: tuple[int, int]) -> Iterator[Batch]:
        """Yield (images, targets); size and mirroring of an image depend on key and index alone."""
        sizes = self._min_sizes, self.shape[2]
        samples = _TrainingSamples(self._train, *sizes, self._augment, key)
        return load_batches(samples, indices, self._workers, ([], []), self.faults, _lists)

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's images and their ids; see Data.evaluate.

        One at a time, whatever `batch_size`: together they would be padded to one size, and what is
        found in one would depend on the others.
        """
        indices = eval_indices(self.eval_size, shard.world_size, shard)
        samples = _EvaluationSamples(self.truth)
        return load_batches(samples, indices, self._workers, ([], []), self.faults, _lists)


def _lists(samples: list[Any]) -> Batch:
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


class _EvaluationSamples(Dataset[Sample]):
    """(image, target) as they are on disk."""

    def __init__(self, pictures: Sequence[Picture]) -> None:
        self.pictures = pictures

    def __getitem__(self, index: int) -> Sample:
        pixels = _decode(self.pictures[index])
        if isinstance(pixels, Unreadable):
            return pixels
        return _to_tensor(pixels), {"image_id": torch.tensor(self.pictures[index].id)}


class _TrainingSamples(Dataset[Sample]):
    """(image, target) resized and perhaps mirrored: a pure function of key and index."""

    def __init__(
        self,
        pictures: Sequence[Picture],
        min_sizes: Sequence[int],
        max_size: int,
        augment: bool,
        key: tuple[int, int],
    ) -> None:
        self.pictures, self.min_sizes, self.max_size = pictures, min_sizes, max_size
        self.augment, self.key = augment, key

    def __getitem__(self, index: int) -> Sample:
        picture = self.pictures[index]
        pixels = _decode(picture)
        if isinstance(pixels, Unreadable):
            return pixels
        height, width, things = picture.height, picture.width, picture.things
        masks = torch.from_numpy(decode([x.segmentation for x in things], height, width))
        boxes = torch.tensor([x.corners(height, width) for x in things], dtype=torch.float32)
        generator = keyed_generator(*self.key, index)
        image, boxes, masks = self._augmented(_to_tensor(pixels), boxes, masks, generator)
        return image, {
            "image_id": torch.tensor(picture.id),
            "boxes": boxes,
            "labels": torch.tensor([x.label for x in things]),
            "masks": masks,
        }

    def _augmented(
        self, image: Tensor, boxes: Tensor, masks: Tensor, generator: Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        draw, mirror = torch.rand(2, generator=generator).tolist()
        size = self.min_sizes[int(draw * len(self.min_sizes))]
        resized_to = resized(image, boxes, masks, size, self.max_size)
        return mirrored(*resized_to) if self.augment and mirror < 0.5 else resized_to


def _to_tensor(pixels: Any) -> Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def resized(
    image: Tensor, boxes: Tensor, masks: Tensor, min_size: int, max_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """[C, H, W] with boxes and masks: its shorter side ``min_size``, none above ``max_size``.

    Bilinear, masks by the nearest pixel, sizes rounded down: as torchvision's detectors do.
    """
    height, width = image.shape[-2:]
    scale = min(min_size / min(height, width), max_size / max(height, width))
    size = [max(1, int(height * scale)), max(1, int(width * scale))]
    if size != [height, width]:
        image = functional.interpolate(image[None], size, mode="bilinear", align_corners=False)[0]
        masks = functional.interpolate(masks[None], size)[0]
    ratio = torch.tensor([size[1] / width, size[0] / height]).repeat(2)
    return image, boxes * ratio, masks


def mirrored(image: Tensor, boxes: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Left becomes right."""
    x1, y1, x2, y2 = boxes.unbind(1)
    width = image.shape[-1]
    return image.flip(-1), torch.stack([width - x2, y1, width - x1, y2], 1), masks.flip(-1)
