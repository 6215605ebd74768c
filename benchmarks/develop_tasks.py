"""The seven small tasks on which the defaults of K-FAC are judged, and a recurrent one.

None of them needs a download, and a run takes seconds on one thread. Number of steps, batch sizes
and metrics were chosen before any run with K-FAC. ``benchmarks/defaults.py`` trains them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import Data
from kfac_bench.data.images import digits, pictures
from kfac_bench.data.language import pydoc
from kfac_bench.models.image_networks import Autoencoder, UNet, cifar_resnet
from kfac_bench.models.token_networks import Transformer
from kfac_bench.tasks.image_tasks import Classification, Denoising, Reconstruction
from kfac_bench.tasks.language_tasks import LanguageModel
from kfac_bench.tasks.task import SummedTask


@dataclass(frozen=True)
class DevelopTask:
    """A dataset, a model and an objective, with the length of a run."""

    name: str
    data: Callable[[], Data]
    model: Callable[[], nn.Module]
    objective: Callable[[], SummedTask]
    metric: str
    """Name of the metric on the held-back examples; lower is better."""
    batch_size: int
    steps: int
    evaluations: int = 20
    """Evaluations of a run; between them, the metric after equal seconds is interpolated."""
    stride: int = 1
    """An evaluation reads only every so many-th held-back example."""
    batch_statistics: bool = False
    """True if batch norm uses the batch in evaluations, because its averages are too old."""


class MLP(nn.Sequential):
    """Three linear layers with ReLU: 64-128-128-10."""

    def __init__(self) -> None:
        layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
        super().__init__(nn.Flatten(), *layers, nn.Linear(128, 10))


class ConvolutionalNet(nn.Sequential):
    """Two 3x3 convolutions with ReLU and pooling, and two linear layers; no normalization."""

    def __init__(self) -> None:
        first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        super().__init__(*first, *second, nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


class VAE(nn.Module):
    """A variational autoencoder 64-128-8-128-64 of pixels in [0, 1] (Kingma & Welling 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(128, 8), nn.Linear(128, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map images to logits of the pixels, and to mean and log variance of the code.

        In training mode the code is sampled, otherwise it is the mean.
        """
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean
        if self.training:
            code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code).view_as(x), mean, log_variance


class GRULanguageModel(nn.Module):
    """An embedding of 64 entries, a GRU of 128 units and a linear layer to 96 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(pydoc.SYMBOLS, 64)
        self.gru = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, pydoc.SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        """Map symbols [n, L] to the logits of the symbol that follows each."""
        logits: Tensor = self.head(self.gru(self.tokens(x))[0])
        return logits


class NegativeELBO(SummedTask):
    """Cross entropy of the pixels plus the KL divergence of the code, in nats per image."""

    num_totals = 2

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean over the examples, and the logits of the pixels."""
        images, _ = batch
        logits, mean, log_variance = model(images)
        error = functional.binary_cross_entropy_with_logits(logits, images, reduction="sum")
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
        return (error + kl) / len(images), logits

    @torch.no_grad()
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return [examples, sum of the loss], float64."""
        loss = self.forward(model, batch)[0].double()
        return torch.stack([torch.full_like(loss, len(batch[0])), loss * len(batch[0])])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return `negative_elbo` over all examples that the totals count."""
        examples, loss = totals.tolist()
        return {"negative_elbo": loss / examples}


class DenoisingError(Denoising):
    """Denoising whose metric is 1000 times the mean squared error, so that lower is better."""

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return `squared_error` of pixels in [0, 1], times 1000."""
        count, error = totals.tolist()
        return {"squared_error": 1e3 * error / count}


def _classification(name: str, model: Callable[[], nn.Module], steps: int) -> DevelopTask:
    return DevelopTask(name, digits.load, model, Classification, "loss", 64, steps)


def _patches() -> Data:
    return pictures.load(16)


TASKS = {
    task.name: task
    for task in (
        _classification("digits MLP", MLP, 300),
        _classification("digits conv net", ConvolutionalNet, 300),
        DevelopTask(
            "digits autoencoder",
            lambda: digits.load(normalize=False),
            lambda: Autoencoder(64, [128, 64, 32, 12]),
            Reconstruction,
            "squared_error",
            449,
            1000,
        ),
        _classification("digits ResNet-8", lambda: cifar_resnet(8, in_channels=1), 200),
        DevelopTask(
            "pictures U-Net",
            _patches,
            lambda: UNet(1, 1, width=8, depth=2),
            lambda: DenoisingError(16 * 16, _patches().looks),
            "squared_error",
            64,
            200,
        ),
        DevelopTask(
            "pydoc transformer",
            lambda: pydoc.load(32),
            lambda: Transformer(96, 32, width=64, layers=2, heads=4),
            LanguageModel,
            "loss",
            32,
            500,
        ),
        DevelopTask(
            "digits VAE",
            lambda: digits.load(normalize=False),
            VAE,
            NegativeELBO,
            "negative_elbo",
            64,
            1000,
        ),
    )
}

GRU = DevelopTask(
    "pydoc GRU", lambda: pydoc.load(32), GRULanguageModel, LanguageModel, "loss", 64, 400
)
"""EigenAdam's treatment of recurrent weights was developed on it; no default of K-FAC was."""
