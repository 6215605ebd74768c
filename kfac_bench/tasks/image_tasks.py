"""Tasks on images: classification, reconstruction, denoising and segmentation."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import UNKNOWN, ImageDisplay
from kfac_bench.errors import UsageError
from kfac_bench.tasks import pictures
from kfac_bench.tasks.task import Prediction, SummedTask


class Classification(SummedTask):
    """Cross entropy of logits [n, num_classes] with labels [n], smoothed in training only.

    The metrics are `accuracy`, the fraction in [0, 1] of examples whose label has the largest
    logit, and `loss`, the mean cross entropy in nats WITHOUT smoothing, so that settings can be
    compared.

    The likelihood is the softmax of the logits, with smoothed labels too: the Fisher belongs to the
    distribution of the model, and smoothing does not change the Hessian of the loss in the logits.
    """

    def __init__(self, label_smoothing: float = 0.0, looks: ImageDisplay = UNKNOWN) -> None:
        self.metric = "accuracy"
        self.higher_is_better = True
        self.num_totals = 3
        self.likelihood = "categorical"
        self.label_smoothing = label_smoothing
        self.looks = looks

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the smoothed cross entropy, mean over the examples, in nats; and the logits."""
        images, labels = batch
        logits = model(images)
        loss = functional.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        return loss, logits

    @torch.no_grad()
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return [examples, correct examples, sum of cross entropies], float64."""
        images, labels = batch
        logits = model(images).double()
        correct = (logits.argmax(dim=1) == labels).sum()
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return torch.stack([torch.full_like(loss, len(labels)), correct.double(), loss])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return `accuracy` and `loss` over all examples that the totals count."""
        examples, correct, loss = totals.tolist()
        return {"accuracy": correct / examples, "loss": loss / examples}

    @torch.no_grad()
    def show(self, model: nn.Module, batch: Batch, count: int) -> list[Prediction]:
        """Return images with their true class, the predicted class, and its probability.

        Wrong predictions come first. Among the wrong ones, and among the right ones, the images
        whose true class is least likely come first.
        """
        images, labels = batch
        probabilities = model(images).double().softmax(dim=1)
        likeliest, predicted = probabilities.max(dim=1)
        true = probabilities.gather(1, labels[:, None])[:, 0]
        worst = (true + (predicted == labels)).argsort(stable=True)[:count]
        return [
            Prediction(
                self._caption(int(labels[i]), int(predicted[i]), likeliest[i].item()),
                pictures.fit(pictures.to_rgb(images[i], self.looks)),
            )
            for i in worst.tolist()
        ]

    def _caption(self, label: int, predicted: int, probability: float) -> str:
        names = dict(enumerate(self.looks.classes))
        true, said = (names.get(c, str(c)) for c in (label, predicted))
        if label == predicted:
            return f"right: {said} ({probability:.2f})"
        return f"wrong: {said} ({probability:.2f}), true: {true}"


class _PixelTask(SummedTask):
    """The base of tasks whose output has the shape of a target image."""

    need: str
    """The demand on the model, for the error message."""

    def _output(self, model: nn.Module, images: Tensor, target: Tensor) -> Tensor:
        output: Tensor = model(images)
        # Without this check, broadcasting might turn another shape into a number.
        if output.shape != target.shape:
            raise UsageError(
                f"{self.need}: the output must be {list(target.shape)}, not {list(output.shape)}"
            )
        return output


class Reconstruction(_PixelTask):
    """Squared error between an image and the model's output of the same shape.

    The metric `squared_error` is the squared difference SUMMED over the pixels of an image, mean
    over the images, in squared units of the input; lower is better. The training loss is HALF of
    the metric. So the loss is the negative log likelihood of a Gaussian with unit variance around
    the output. The Fisher of this Gaussian is the Gauss-Newton matrix of the loss, so K-FAC
    approximates the right matrix, without a stray factor.
    """

    need = "reconstruction needs a model whose output has the shape of its input"

    def __init__(self, looks: ImageDisplay = UNKNOWN) -> None:
        self.metric = "squared_error"
        self.higher_is_better = False
        self.num_totals = 2
        self.likelihood = "gaussian"
        self.looks = looks

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return half the squared error, mean over the examples; and the output."""
        images, _ = batch
        output = self._output(model, images, images)
        return 0.5 * (output - images).square().sum() / len(images), output

    @torch.no_grad()
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return [examples, sum of squared errors], float64."""
        images, _ = batch
        error = (self._output(model, images, images).double() - images.double()).square().sum()
        return torch.stack([torch.full_like(error, len(images)), error])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return `squared_error` over all examples that the totals count."""
        examples, error = totals.tolist()
        return {"squared_error": error / examples}

    @torch.no_grad()
    def show(self, model: nn.Module, batch: Batch, count: int) -> list[Prediction]:
        """Return inputs beside outputs, on one grey scale; the largest errors first."""
        images, _ = batch
        output = self._output(model, images, images)
        errors = (output.double() - images.double()).square().flatten(1).sum(1)
        shown = []
        for i in errors.argsort(descending=True, stable=True)[:count].tolist():
            both = pictures.to_rgb(torch.cat([images[i], output[i].to(images)], dim=2), self.looks)
            width = images.shape[3]
            sides = (pictures.fit(side) for side in (both[:, :width], both[:, width:]))
            caption = f"squared error {errors[i].item():.3g}; input, output"
            shown.append(Prediction(caption, pictures.beside(*sides)))
        return shown


class Denoising(_PixelTask):
    """Squared error between the model's output and a clean image, both [n, C, H, W].

    The metric `psnr` is 10 log10 of 1 over the mean squared error of all pixels of all images, in
    dB, where pixels are in [0, 1]; higher is better. The training loss is half the squared error of
    the normalized images, MEAN over pixels and examples. `pixels` is the number of pixels of an
    image (C H W): the loss is the negative log likelihood of a Gaussian with the curvature
    1 / `pixels`.
    """

    need = "denoising needs a model whose output has the shape of the clean image"

    def __init__(self, pixels: int, looks: ImageDisplay = UNKNOWN) -> None:
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
        output = self._output(model, *batch[:2])
        return 0.5 * (output - batch[1]).square().mean(), output

    @torch.no_grad()
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return [pixels, sum of squared errors], float64, of pixels in [0, 1]."""
        output = self._output(model, *batch[:2]).double()
        error = (output - batch[1].double()).square().sum() * self._scale
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
        output = self._output(model, *batch[:2])
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


TRUE, PREDICTED = (255, 225, 25), (240, 50, 230)
"""Yellow and magenta: two outlines that can be told apart on any slice."""
SMOOTH = 1.0
"""Pixels added to both sides of an image's Dice ratio."""


class Segmentation(_PixelTask):
    """Soft Dice loss of logits [n, 1, H, W] with masks [n, 1, H, W] of 0 and 1.

    With p the sigmoid of the logits and t the mask, the loss of an image is
    1 - (2 sum(p t) + `SMOOTH`) / (sum(p) + sum(t) + `SMOOTH`), plus `bce` times the binary cross
    entropy (nats, mean over pixels). The training loss is the MEAN over images, each with its own
    ratio, because K-FAC needs a mean over examples, and ranks and parts of a batch then add up.
    (The LGG reference takes one ratio over all pixels of a batch, which is not a mean over
    examples.) In an image without a tumour, the ratio has hardly any gradient while the model finds
    much there; the cross entropy has one.

    Metrics: `dice` is the mean over VOLUMES, including volumes without a tumour, of
    2 |P and T| / (|P| + |T|). P are the pixels of a volume with a positive logit, T the pixels of
    its masks, both counted over all slices; the value is 1 if both are empty. A volume of which no
    slice can be read does not count. `loss` is the training loss, mean over the images. `volumes`
    is the number of volumes of the evaluation set.
    An evaluation batch has a third tensor, int64 [n]: the volume of each image, counted from 0.

    The likelihood treats pixels as independent. Dice is not its negative logarithm. So with
    `kfac.fisher=mc|type2` the update is a natural gradient of this loss in the metric of the
    likelihood. The Fisher of the likelihood is a SUM over pixels, H W times the curvature of the
    mean that `bce` weighs, so the damping needs that scale. The empirical Fisher is made of the
    gradients of the loss itself.
    """

    need = "segmentation needs one logit per pixel of a mask"

    def __init__(self, volumes: int = 1, bce: float = 1.0) -> None:
        self.metric = "dice"
        self.higher_is_better = True
        self.num_totals = 2 + 4 * volumes
        self.likelihood = "bernoulli"
        self.volumes = volumes
        self.bce = bce

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss, mean over the images; and the logits."""
        logits = self._output(model, *batch[:2])
        return self._losses(logits, batch[1]).mean(), logits

    def _losses(self, logits: Tensor, masks: Tensor) -> Tensor:
        """Return the loss of each image [n], in >= float32: thousands of pixels are added up."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        x, t = logits.to(dtype).flatten(1), masks.to(dtype).flatten(1)
        p = x.sigmoid()
        both, each = (p * t).sum(1), p.sum(1) + t.sum(1)
        losses = 1 - (2 * both + SMOOTH) / (each + SMOOTH)
        if self.bce:
            bce = functional.binary_cross_entropy_with_logits(x, t, reduction="none")
            losses = losses + self.bce * bce.mean(1)
        return losses

    @torch.no_grad()
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return [images, sum of losses, of each volume |P and T|, |P|, |T|, slices], float64."""
        _, masks, volumes = batch
        logits = self._output(model, *batch[:2])
        predicted, true = (logits > 0).flatten(1), (masks > 0).flatten(1)
        sums = [x.sum(1) for x in (predicted & true, predicted, true)]
        counts = torch.stack([*sums, torch.ones_like(sums[0])], dim=1)
        by_volume = counts.new_zeros(self.volumes, 4).index_add_(0, volumes, counts)
        loss = self._losses(logits.double(), masks).sum()
        head = torch.stack([torch.full_like(loss, len(masks)), loss])
        return torch.cat([head, by_volume.double().flatten()])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return `dice` and `loss` over all volumes and images that the totals count."""
        images, loss = totals[:2].tolist()
        both, predicted, true, slices = totals[2:].view(self.volumes, 4).unbind(1)
        each = predicted + true
        dice = torch.where(each > 0, 2 * both / each.clamp_min(1), 1.0)
        return {"dice": dice[slices > 0].mean().item(), "loss": loss / images}

    @torch.no_grad()
    def show(self, model: nn.Module, batch: Batch, count: int) -> list[Prediction]:
        """Return slices with true and predicted outline; the most wrong pixels first.

        The smallest value of each slice is black, the largest one white.
        """
        images, masks, volumes = batch
        predicted, true = self._output(model, *batch[:2])[:, 0] > 0, masks[:, 0] > 0
        wrong = (predicted ^ true).flatten(1).sum(1)
        shown = []
        for i in wrong.argsort(descending=True, stable=True)[:count].tolist():
            picture = pictures.fit(pictures.to_rgb(images[i], UNKNOWN))
            for mask, colour, width in ((true, TRUE, 4), (predicted, PREDICTED, 2)):
                inside = pictures.fit(mask[i].to(torch.uint8).cpu().numpy())
                picture = pictures.outline(picture, inside, colour, width)
            both, each = (predicted[i] & true[i]).sum(), predicted[i].sum() + true[i].sum()
            dice = 2 * both.item() / each.item() if each else 1.0
            caption = (
                f"slice of volume {volumes[i].item()}: Dice {dice:.2f}; true yellow, predicted "
                "magenta"
            )
            shown.append(Prediction(caption, picture))
        return shown
