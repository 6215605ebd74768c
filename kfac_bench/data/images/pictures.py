"""Reading patches of scikit-image's pictures, in grey: to be denoised, or to be classified.

The pictures are those that the scikit-image wheel contains; scikit-image would download others.
For denoising, photographs and textures are for training, other pictures are held out. For
classification every picture is a class, so patches of every picture are held out.
"""

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import ImageDisplay
from kfac_bench.data.base.in_memory import InMemory, LabelledImages
from kfac_bench.data.base.order import keyed_generator
from kfac_bench.data.images.digits import installed_file
from kfac_bench.errors import UsageError

TRAIN = (
    "brick.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "moon.png",
    "rocket.jpg",
)
HELD_OUT = ("astronaut.png", "cell.png", "ihc.png", "page.png")
EVAL_SIZE = 256
CLASSES = tuple(sorted((*TRAIN, *HELD_OUT)))
"""The pictures in the order of the labels of a classification."""
HELD_OUT_SHARE = 4
"""One patch of this many is held out for the evaluation of a classification."""
MEAN, STD = 0.5, 0.25
"""About the mean and deviation of the pixels in [0, 1]. A model sees (pixel - MEAN) / STD."""


def load(size: int = 32, noise: float = 0.15) -> InMemory:
    """Return noisy and clean patches, float32 [n, 1, size, size] each, normalised.

    Patches do not overlap. The 256 held-out patches are evenly chosen and the same for all seeds.

    Args:
        size: Side of a patch in pixels.
        noise: Standard deviation of the Gaussian noise, of pixels in [0, 1]. Each patch gets its
            noise once: it is the same in all epochs.

    Raises:
        UsageError: scikit-image is not installed, or a patch is larger than the pictures.
    """
    train, held_out = (torch.cat([_patches(n, size) for n in names]) for names in (TRAIN, HELD_OUT))
    if not len(train) or not len(held_out):
        most = min(max(min(_grey(n).shape) for n in names) for names in (TRAIN, HELD_OUT))
        raise UsageError(
            f"data.image_size={size}: scikit-image's pictures are smaller. "
            f"Set data.image_size to {most} or less"
        )
    count = min(EVAL_SIZE, len(held_out))
    held_out = held_out[torch.arange(count) * len(held_out) // count]
    return InMemory(
        "pictures",
        (_noisy(train, noise, 0), train),
        (_noisy(held_out, noise, 1), held_out),
        shape=(1, size, size),
        num_classes=1,
        prepare=_normalize,
        looks=ImageDisplay([MEAN], [STD]),
    )


def load_labelled(size: int = 16) -> LabelledImages:
    """Return patches, float32 [n, 1, size, size] in [0, 1], and the picture that each comes from.

    Patches do not overlap. Every fourth patch of a picture, row by row, is held out; the same ones
    for all seeds. `prepare` normalizes as it does in `load`.

    Args:
        size: Side of a patch in pixels.

    Raises:
        UsageError: scikit-image is not installed, or a picture has less than two patches.
    """
    train, evaluation = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
    for label, name in enumerate(CLASSES):
        patches = _patches(name, size)
        if len(patches) < 2:
            # Two patches lie beside each other along the longer side.
            sides = [sorted(_grey(n).shape) for n in CLASSES]
            most = min(min(short, long // 2) for short, long in sides)
            raise UsageError(
                f"data.image_size={size}: {name} has less than two patches. "
                f"Set data.image_size to {most} or less"
            )
        labels = torch.full((len(patches),), label)
        held_out = torch.arange(len(patches)) % HELD_OUT_SHARE == 0
        train.append((patches[~held_out], labels[~held_out]))
        evaluation.append((patches[held_out], labels[held_out]))
    return LabelledImages(
        "patches",
        _joined(train),
        _joined(evaluation),
        num_classes=len(CLASSES),
        mean=[MEAN],
        std=[STD],
        classes=[name.partition(".")[0] for name in CLASSES],
    )


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    patches, labels = zip(*parts, strict=True)
    return torch.cat(patches), torch.cat(labels)


def _patches(name: str, size: int) -> Tensor:
    """Return the patches of one picture, float32 [n, 1, size, size] in [0, 1]."""
    grey = _grey(name)
    if min(grey.shape) < size:
        return torch.empty(0, 1, size, size)
    return grey.unfold(0, size, size).unfold(1, size, size).reshape(-1, 1, size, size).contiguous()


def _grey(name: str) -> Tensor:
    """Return one picture in grey, float32 [height, width] in [0, 1]."""
    file = installed_file("skimage", f"data/{name}", "pictures")
    with Image.open(file) as image:
        picture = np.asarray(image)
    if picture.ndim == 3:
        # The luma of ITU-R 601.
        picture = picture[..., :3] @ np.array([0.299, 0.587, 0.114])
    return torch.from_numpy(picture.astype(np.float32) / 255)


def _noisy(clean: Tensor, noise: float, key: int) -> Tensor:
    return clean + noise * torch.randn(clean.shape, generator=keyed_generator(key))


def _normalize(batch: Batch) -> Batch:
    return tuple((x - MEAN) / STD for x in batch)
