"""Normalization of images by the mean and standard deviation of each channel."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Normalize:
    """Map images x [n, C, H, W] to (x - mean) / std in float32; uint8 is scaled to [0, 1] first."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = (
            torch.tensor(v, dtype=torch.float32).view(1, -1, 1, 1) for v in (mean, std)
        )

    def __call__(self, images: Tensor) -> Tensor:
        """Return the normalized images, on the device of `images`."""
        # Only the first batch on a device copies mean and std.
        if self._mean.device != images.device:
            self._mean, self._std = self._mean.to(images.device), self._std.to(images.device)
        scale = 255.0 if images.dtype == torch.uint8 else 1.0
        return (images.float() / scale - self._mean) / self._std
