"""Super-resolution: patches of scikit-image's photographs, enlarged from half their size.

The network corrects what bicubic interpolation makes (Kim et al. 2016, VDSR, here small).
"""

from pathlib import Path

import numpy as np
import skimage
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from kfac_bench import Problem

FOLDER = Path(skimage.__file__).parent / "data"
TRAIN = ["brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "rocket.jpg"]
SIZE = 32


def patches(names):
    parts = []
    for name in names:
        picture = torch.tensor(np.array(Image.open(FOLDER / name).convert("L"))) / 255
        squares = picture.unfold(0, SIZE, SIZE).unfold(1, SIZE, SIZE)
        parts.append(squares.reshape(-1, 1, SIZE, SIZE))
    fine = torch.cat(parts)
    return TensorDataset(functional.avg_pool2d(fine, 2), fine)


class Enlarge(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, 4, 3, padding=1), nn.PixelShuffle(2),
        )  # fmt: skip

    def forward(self, x):
        return functional.interpolate(x, scale_factor=2, mode="bicubic") + self.layers(x)


def psnr(model, batch):
    """Return the peak signal-to-noise ratio of each picture, in dB."""
    coarse, fine = batch
    return -10 * (model(coarse) - fine).square().mean((1, 2, 3)).clamp_min(1e-10).log10()


problem = Problem(
    model=Enlarge,
    train=patches(TRAIN),
    validation=patches(["astronaut.png"]),
    loss=nn.MSELoss(),
    metric=psnr,
    higher_is_better=True,
    batch_size=64,
    target=36.65,
    likelihood="gaussian",
    curvature=2 / SIZE**2,
)
