"""Patches of scikit-image's pictures with noise on them: real pictures without a download.

Only pictures that are inside the wheel; others it would fetch. Photographs and textures train,
other pictures are held out. In grey.
"""

import numpy as np
import torch
from torch import Tensor

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import Looks
from kfac_bench.data.base.in_memory import InMemory
from kfac_bench.data.base.order import keyed_generator
from kfac_bench.errors import UsageError

TRAIN = ("brick", "camera", "chelsea", "coffee", "coins", "grass", "gravel", "moon", "rocket")
HELD_OUT = ("astronaut", "cell", "immunohistochemistry", "page")
EVAL_SIZE = 256
MEAN, STD = 0.5, 0.25
"""Of the pixels in [0, 1], about; a model sees (pixel - MEAN) / STD."""


def load(size: int = 32, noise: float = 0.15) -> InMemory:
    """Return noisy and clean patches, float32 [n, 1, size, size] each, normalised.

    Patches do not overlap; the noise, Gaussian of that deviation in pixels of [0, 1], is drawn
    once for each. The 256 held-out patches, evenly chosen, are the same for all seeds. Raises
    UsageError where scikit-image is not installed, or a patch is larger than the pictures.
    """
    train, held_out = (torch.cat([_patches(n, size) for n in names]) for names in (TRAIN, HELD_OUT))
    if not len(train) or not len(held_out):
        raise UsageError(f"data.image_size={size}: scikit-image's pictures are smaller")
    count = min(EVAL_SIZE, len(held_out))
    held_out = held_out[torch.arange(count) * len(held_out) // count]
    return InMemory(
        "pictures",
        (_noisy(train, noise, 0), train),
        (_noisy(held_out, noise, 1), held_out),
        shape=(1, size, size),
        num_classes=1,
        prepare=_normalize,
        looks=Looks([MEAN], [STD]),
    )


def _patches(name: str, size: int) -> Tensor:
    """Of a picture, float32 [n, 1, size, size] in [0, 1]."""
    try:
        import skimage.data
    except ImportError:
        raise UsageError(
            "data=pictures needs scikit-image: pip install 'kfac-bench[pictures]'"
        ) from None
    picture = np.asarray(getattr(skimage.data, name)())
    if picture.ndim == 3:  # ITU-R 601 luma
        picture = picture[..., :3] @ np.array([0.299, 0.587, 0.114])
    grey = torch.from_numpy(picture.astype(np.float32) / 255)
    if min(grey.shape) < size:
        return torch.empty(0, 1, size, size)
    return grey.unfold(0, size, size).unfold(1, size, size).reshape(-1, 1, size, size).contiguous()


def _noisy(clean: Tensor, noise: float, key: int) -> Tensor:
    return clean + noise * torch.randn(clean.shape, generator=keyed_generator(key))


def _normalize(batch: Batch) -> Batch:
    return tuple((x - MEAN) / STD for x in batch)
