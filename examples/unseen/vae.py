"""A convolutional variational autoencoder on 10,000 images of Fashion-MNIST.

The files are those of Debian's package dataset-fashion-mnist; kfac-data fetch fashion_mnist gets
them elsewhere.
"""

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from kfac_bench import Problem

FOLDER, HEADER = Path("/usr/share/datasets/fashion-mnist"), 16


def images(name, count):
    with gzip.open(FOLDER / name) as file:
        pixels = np.frombuffer(file.read(HEADER + count * 784), np.uint8, offset=HEADER)
    return torch.tensor(pixels, dtype=torch.float32).view(count, 1, 28, 28) / 255


class VAE(nn.Module):
    def __init__(self, width=16, latent=20):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.SiLU(),
            nn.Flatten(), nn.Linear(2 * width * 49, 2 * latent),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(latent, 2 * width * 49), nn.SiLU(), nn.Unflatten(1, (2 * width, 7, 7)),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1), nn.SiLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        )  # fmt: skip

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def negative_bound(model, batch):
    """Return the negative evidence lower bound of each image, in nats."""
    (x,) = batch
    logits, mean, log_variance = model(x)
    error = functional.binary_cross_entropy_with_logits(logits, x, reduction="none")
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance) / 2
    return error.sum((1, 2, 3)) + divergence.sum(1)


def loss(model, batch):
    return negative_bound(model, batch).mean()


problem = Problem(
    model=VAE,
    train=TensorDataset(images("train-images-idx3-ubyte.gz", 10_000)),
    validation=TensorDataset(images("t10k-images-idx3-ubyte.gz", 1_000)),
    loss=loss,
    metric=negative_bound,
    higher_is_better=False,
    batch_size=250,
    target=280.0,
)
