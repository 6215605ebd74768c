"""Segmentation: one mask for each image, of the pixels that belong to the object."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import UNKNOWN
from kfac_bench.errors import UsageError
from kfac_bench.tasks import pictures
from kfac_bench.tasks.evaluation import SummedTask
from kfac_bench.tasks.prediction import Prediction

TRUE, PREDICTED = (255, 225, 25), (240, 50, 230)
"""Yellow and magenta: two outlines that can be told apart on any slice."""


class Segmentation(SummedTask):
    """Soft Dice loss of logits [n, 1, H, W] with masks [n, 1, H, W] of 0 and 1.

    With p the sigmoid of the logits and t the mask, the loss of an image is
    1 - (2 sum(p t) + `smooth`) / (sum(p) + sum(t) + `smooth`), plus `bce` times the binary cross
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

    def __init__(self, volumes: int = 1, smooth: float = 1.0, bce: float = 1.0) -> None:
        self.metric = "dice"
        self.higher_is_better = True
        self.num_totals = 2 + 4 * volumes
        self.likelihood = "bernoulli"
        self.volumes = volumes
        self.smooth = smooth
        self.bce = bce

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss, mean over the images; and the logits."""
        logits = _logits(model, batch)
        return self._losses(logits, batch[1]).mean(), logits

    def _losses(self, logits: Tensor, masks: Tensor) -> Tensor:
        """Return the loss of each image [n], in >= float32: thousands of pixels are added up."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        x, t = logits.to(dtype).flatten(1), masks.to(dtype).flatten(1)
        p = x.sigmoid()
        both, each = (p * t).sum(1), p.sum(1) + t.sum(1)
        losses = 1 - (2 * both + self.smooth) / (each + self.smooth)
        if self.bce:
            bce = functional.binary_cross_entropy_with_logits(x, t, reduction="none")
            losses = losses + self.bce * bce.mean(1)
        return losses

    @torch.no_grad()
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return [images, sum of losses, of each volume |P and T|, |P|, |T|, slices], float64."""
        _, masks, volumes = batch
        logits = _logits(model, batch)
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
        predicted, true = _logits(model, batch)[:, 0] > 0, masks[:, 0] > 0
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


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(batch[0])
    # Without this check, broadcasting might turn another shape into a number.
    if logits.shape != batch[1].shape:
        raise UsageError(
            f"segmentation needs one logit per pixel of a mask: masks are {list(batch[1].shape)}, "
            f"the model's output is {list(logits.shape)}"
        )
    return logits
