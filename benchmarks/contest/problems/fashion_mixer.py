"""An MLP-Mixer (Tolstikhin et al. 2021) on the first 15,000 images of Fashion-MNIST.

Two blocks of width 64 see 49 patches of 4 x 4 pixels. An evaluation takes the first 2,000 of the
10,000 evaluation images. The files are those of Debian's package dataset-fashion-mnist.
"""

import gzip

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from kfac_bench import Problem
from kfac_bench.data.images.idx_images import DEBIAN, FASHION_MNIST


def examples(prefix: str, count: int) -> TensorDataset:
    """Return images [count, 1, 28, 28] with mean 0 and standard deviation 1, and labels."""
    with gzip.open(DEBIAN / f"{prefix}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(16 + count * 784), np.uint8, offset=16)
    with gzip.open(DEBIAN / f"{prefix}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(8 + count), np.uint8, offset=8)
    x = torch.tensor(pixels, dtype=torch.float32).view(count, 1, 28, 28) / 255
    return TensorDataset((x - FASHION_MNIST.mean) / FASHION_MNIST.std, torch.tensor(labels).long())


def mlp(width: int, hidden: int) -> nn.Sequential:
    """Return two linear layers with a GELU between them."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Block(nn.Module):
    """One MLP mixes the patches of a channel, and one the channels of a patch."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.of_patches, self.of_channels = mlp(patches, 64), mlp(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, patches, width] to the same shape."""
        x = x + self.of_patches(self.norms[0](x).mT).mT
        mixed: Tensor = x + self.of_channels(self.norms[1](x))
        return mixed


class Mixer(nn.Module):
    """Patches, two blocks, the mean over the patches, and a linear layer to ten classes."""

    def __init__(self, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.blocks = nn.Sequential(*(Block(49, width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to logits."""
        tokens = self.blocks(self.patches(x).flatten(2).mT)
        logits: Tensor = self.head(self.norm(tokens).mean(1))
        return logits


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return 1 for each image whose label is right, else 0."""
    images, labels = batch
    right: Tensor = model(images).argmax(1) == labels
    return right.float()


def problem() -> Problem:
    """Return the problem."""
    return Problem(
        model=Mixer,
        train=examples("train", 15_000),
        validation=examples("t10k", 2_000),
        loss=nn.CrossEntropyLoss(),
        metric=accuracy,
        higher_is_better=True,
        batch_size=128,
        likelihood="categorical",
    )
