"""One mask per image: which pixels belong to the thing sought."""

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
"""Yellow and magenta: two outlines that are told apart on any slice."""


class Segmentation(SummedTask):
    """Soft Dice loss of logits [n, 1, H, W] with masks [n, 1, H, W] of 0 and 1.

    With p the sigmoid of the logits and t the mask, an image's loss is
    1 - (2 sum(p t) + `smooth`) / (sum(p) + sum(t) + `smooth`), plus `bce` times its binary cross
    entropy (nats, mean over pixels). The training loss is the MEAN over images, each with its own
    ratio: as K-FAC needs it, and so that ranks and parts of a batch add up. (The LGG reference
    takes one ratio over all pixels of a batch, which is no mean over examples.) An image without
    a tumour hardly has a gradient of its ratio while much is found in it; that of `bce` it has.

    Metrics: `dice`, the mean over VOLUMES, those without a tumour included, of
    2 |P and T| / (|P| + |T|), where P are a volume's pixels of positive logit and T those of its
    masks, counted over all its slices; 1 where both are empty. And `loss`, the training loss,
    mean over the images. `volumes` is how many the evaluation set has; its batches have a third
    tensor, int64 [n], each image's volume from 0 on.

    The likelihood is that of independent pixels. Dice is not its negative logarithm: with
    `kfac.fisher=mc|type2` the update is a natural gradient of this loss in the metric of that
    model, whose Fisher is a SUM over pixels (H W times the curvature of the mean that `bce`
    weighs), so damping is of that scale. The empirical Fisher is made of the loss' own gradients.
    """

    def __init__(self, volumes: int = 1, smooth: float = 1.0, bce: float = 1.0) -> None:
        self.metric = "dice"
        self.higher_is_better = True
        self.num_totals = 2 + 3 * volumes
        self.likelihood = "bernoulli"
        self.volumes = volumes
        self.smooth = smooth
        self.bce = bce

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss, mean over the images; and the logits."""
        logits = _logits(model, batch)
        return self._losses(logits, batch[1]).mean(), logits

    def _losses(self, logits: Tensor, masks: Tensor) -> Tensor:
        """By image, [n], at least in float32: thousands of pixels are added up."""
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
        """Return [images, sum of losses, then of each volume |P and T|, |P|, |T|], float64."""
        _, masks, volumes = batch
        logits = _logits(model, batch)
        predicted, true = (logits > 0).flatten(1), (masks > 0).flatten(1)
        counts = torch.stack([x.sum(1) for x in (predicted & true, predicted, true)], dim=1)
        by_volume = counts.new_zeros(self.volumes, 3).index_add_(0, volumes, counts)
        loss = self._losses(logits.double(), masks).sum()
        head = torch.stack([torch.full_like(loss, len(masks)), loss])
        return torch.cat([head, by_volume.double().flatten()])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return `dice` and `loss` over all volumes and images that the totals count."""
        images, loss = totals[:2].tolist()
        both, predicted, true = totals[2:].view(self.volumes, 3).unbind(1)
        each = predicted + true
        dice = torch.where(each > 0, 2 * both / each.clamp_min(1), 1.0)
        return {"dice": dice.mean().item(), "loss": loss / images}

    @torch.no_grad()
    def show(self, model: nn.Module, batch: Batch, count: int) -> list[Prediction]:
        """Return slices with true and predicted outline; those with most wrong pixels first.

        A slice's brightness is its own: its least value is black, its largest white.
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
    if logits.shape != batch[1].shape:  # or broadcasting might make a number of it
        raise UsageError(
            f"segmentation needs one logit per pixel of a mask: masks are {list(batch[1].shape)}, "
            f"the model's output is {list(logits.shape)}"
        )
    return logits
