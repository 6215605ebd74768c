"""Denoising: the clean image of a noisy one."""

import math

import torch
from torch import Tensor, nn

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import UNKNOWN, Looks
from kfac_bench.errors import UsageError
from kfac_bench.tasks import pictures
from kfac_bench.tasks.evaluation import SummedTask
from kfac_bench.tasks.prediction import Prediction


class Denoising(SummedTask):
    """Squared error between the model's output and a clean image, both [n, C, H, W].

    The metric `psnr` is 10 log10 of 1 over the mean squared error of all pixels of all images, in
    dB, where pixels are in [0, 1]; higher is better. The training loss is half the squared error of
    the normalized images, MEAN over pixels and examples. `pixels` is the number of pixels of an
    image (C H W): the loss is the negative log likelihood of a Gaussian with the curvature
    1 / `pixels`.
    """

    def __init__(self, pixels: int, looks: Looks = UNKNOWN) -> None:
        self.metric = "psnr"
        self.higher_is_better = True
        self.num_totals = 2
        self.likelihood = "gaussian"
        self.curvature = 1 / pixels
        self.looks = looks
        # Turns the squared error of normalized images into the squared error of pixels.
        self._scale = looks.std[0] ** 2 if looks.std else 1.0

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return half the mean squared error, and the output."""
        output = _output(model, batch)
        return 0.5 * (output - batch[1]).square().mean(), output

    @torch.no_grad()
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return [pixels, sum of squared errors], float64, of pixels in [0, 1]."""
        error = (_output(model, batch).double() - batch[1].double()).square().sum() * self._scale
        return torch.stack([torch.full_like(error, batch[1].numel()), error])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return `psnr` over all pixels that the totals count."""
        pixels, error = totals.tolist()
        mean = error / pixels
        # An error that is NaN or infinite gives NaN or minus infinity.
        return {"psnr": -10 * math.log10(mean) if mean != 0 else math.inf}

    @torch.no_grad()
    def show(self, model: nn.Module, batch: Batch, count: int) -> list[Prediction]:
        """Return noisy image, output and clean image side by side; the largest errors first."""
        noisy, clean, *_ = batch
        output = _output(model, batch)
        errors = (output - clean).double().square().flatten(1).mean(1) * self._scale
        shown = []
        for i in errors.argsort(descending=True, stable=True)[:count].tolist():
            sides = [
                pictures.fit(pictures.to_rgb(x[i].to(noisy), self.looks))
                for x in (noisy, output, clean)
            ]
            psnr = -10 * math.log10(max(errors[i].item(), 1e-12))
            picture = pictures.beside(pictures.beside(*sides[:2]), sides[2])
            shown.append(Prediction(f"PSNR {psnr:.1f} dB; noisy, output, clean", picture))
        return shown


def _output(model: nn.Module, batch: Batch) -> Tensor:
    output: Tensor = model(batch[0])
    # Without this check, broadcasting might turn another shape into a number.
    if output.shape != batch[1].shape:
        raise UsageError(
            "denoising needs a model whose output has the shape of the clean image: "
            f"{list(batch[1].shape)}, not {list(output.shape)}"
        )
    return output
