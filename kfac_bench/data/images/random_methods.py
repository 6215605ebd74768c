"""The random changes of training images that torchvision has: RandAugment, TrivialAugment, mixup.

torchvision draws from torch's global generator. Here each draw has a seed of its own, so that a
resumed run and a run on several ranks see the same images. The global generator stays as it was.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

from kfac_bench.data.base.batch import Batch, size
from kfac_bench.data.base.order import mixed_seed

METHODS: dict[str, Callable[[], Any]] = {
    "randaugment": v2.RandAugment,
    "trivialaugment": v2.TrivialAugmentWide,
}
"""The methods of ``data.auto_augment``, each with the settings of its paper."""


class RandomMethod:
    """A method of `METHODS` for one image after the other."""

    def __init__(self, name: str) -> None:
        self._method = METHODS[name]()

    def __call__(self, image: Tensor, seed: int) -> Tensor:
        """Return the changed image, uint8 [C, H, W]. The change depends on `seed` alone."""
        with _seeded(seed):
            changed: Tensor = self._method(image)
        return changed

    def of_batch(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return changed images, uint8 [n, C, H, W].

        Args:
            images: The images, uint8 [n, C, H, W].
            draws: Random numbers in [0, 1) for each image, float64 [n, k].
        """
        seeds = (_seed_of(row) for row in draws.tolist())
        changed = [self(image, seed) for image, seed in zip(images, seeds, strict=True)]
        return torch.stack(changed) if changed else images


def _seed_of(draws: Sequence[float]) -> int:
    return mixed_seed(*(int(draw * 2**53) for draw in draws))


class Mixup:
    """Mixup (Zhang et al. 2018): each image becomes a mean of itself and the image before it.

    The share of an image is one draw of Beta(alpha, alpha) for the whole batch. The draw depends on
    seed and step alone, so all ranks have the same share. Each rank mixes its own examples.

    Args:
        alpha: Parameter of the Beta distribution.
        num_classes: Number of classes.
        seed: Seed of the run.
    """

    def __init__(self, alpha: float, num_classes: int, seed: int) -> None:
        self._mix = v2.MixUp(alpha=alpha, num_classes=num_classes, labels_getter=lambda b: b[1])
        self._seed = seed

    def __call__(self, batch: Batch, step: int) -> Batch:
        """Return the mixed batch.

        Args:
            batch: Float images [n, C, H, W] and labels int64 [n].
            step: Updates done before this batch.

        Returns:
            Images of the same shape, and the share of each class, float32 [n, num_classes].
        """
        if not size(batch):
            return batch
        # Epochs of the data are never -2.
        with _seeded(mixed_seed(self._seed, -2, step)):
            mixed: Batch = self._mix(batch)
        return mixed


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generator of the CPU inside the block; afterwards it continues as before."""
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
