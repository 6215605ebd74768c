"""Reconstruction: the input is its own target."""

import torch
from torch import Tensor, nn

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import UNKNOWN, Looks
from kfac_bench.errors import UsageError
from kfac_bench.tasks import pictures
from kfac_bench.tasks.evaluation import SummedTask
from kfac_bench.tasks.prediction import Prediction


class Reconstruction(SummedTask):
    """Squared error between an image and the model's output of the same shape.

    The metric `squared_error` is the squared difference SUMMED over the pixels of an image, mean
    over the images, in squared units of the input; lower is better. The training loss is HALF of
    the metric. So the loss is the negative log likelihood of a Gaussian with unit variance around
    the output. The Fisher of this Gaussian is the Gauss-Newton matrix of the loss, so K-FAC
    approximates the right matrix, without a stray factor.
    """

    def __init__(self, looks: Looks = UNKNOWN) -> None:
        self.metric = "squared_error"
        self.higher_is_better = False
        self.num_totals = 2
        self.likelihood = "gaussian"
        self.looks = looks

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return half the squared error, mean over the examples; and the output."""
        images, _ = batch
        output = _output(model, images)
        return 0.5 * (output - images).square().sum() / len(images), output

    @torch.no_grad()
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return [examples, sum of squared errors], float64."""
        images, _ = batch
        error = (_output(model, images).double() - images.double()).square().sum()
        return torch.stack([torch.full_like(error, len(images)), error])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return `squared_error` over all examples that the totals count."""
        examples, error = totals.tolist()
        return {"squared_error": error / examples}

    @torch.no_grad()
    def show(self, model: nn.Module, batch: Batch, count: int) -> list[Prediction]:
        """Return inputs beside outputs, on one grey scale; the largest errors first."""
        images, _ = batch
        output = _output(model, images)
        errors = (output.double() - images.double()).square().flatten(1).sum(1)
        shown = []
        for i in errors.argsort(descending=True, stable=True)[:count].tolist():
            both = pictures.to_rgb(torch.cat([images[i], output[i].to(images)], dim=2), self.looks)
            width = images.shape[3]
            sides = (pictures.fit(side) for side in (both[:, :width], both[:, width:]))
            caption = f"squared error {errors[i].item():.3g}; input, output"
            shown.append(Prediction(caption, pictures.beside(*sides)))
        return shown


def _output(model: nn.Module, images: Tensor) -> Tensor:
    output: Tensor = model(images)
    # Without this check, broadcasting might turn another shape into a number.
    if output.shape != images.shape:
        raise UsageError(
            "reconstruction needs a model whose output has the shape of its input: "
            f"{list(images.shape)} became {list(output.shape)}"
        )
    return output
