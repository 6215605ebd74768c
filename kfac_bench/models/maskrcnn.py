"""torchvision's Mask R-CNN, and a tiny Mask R-CNN made of torchvision's parts."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN, resnet_fpn_backbone
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNN, MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.resnet import Bottleneck
from torchvision.ops import FrozenBatchNorm2d, MultiScaleRoIAlign

from kfac_bench.errors import UsageError
from kfac_bench.models import weight_files

POSITIVE_SHARE = 0.25
"""Largest share of the boxes that the heads are trained on which hold objects, and get masks."""
RESIDUAL_SCALE = 0.2
"""Factor of each residual branch if no weights are given."""


class Detector(MaskRCNN):  # type: ignore[misc]
    """Mask R-CNN that returns its losses if it gets targets, and the objects found if not.

    torchvision's Mask R-CNN returns its losses in training mode alone. But a batch that stands in
    for an empty batch goes through a model in evaluation mode, so that batch norm and K-FAC ignore
    the batch, and its losses are needed all the same. So :meth:`forward` switches the mode of the
    modules that choose between losses and objects. These modules have no weights of their own.
    Training images already have their size; other images are resized.
    """

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        """Return the losses by name, as scalars, of images [3, H, W] in [0, 1] with targets.

        Without targets, return for each image ``boxes`` [n, 4], ``labels`` [n], ``scores`` [n] and
        ``masks`` [n, 1, H, W] of probabilities.
        """
        switched = (self, self.transform, self.rpn, self.roi_heads)
        before = [module.training for module in switched]
        for module in switched:
            module.training = targets is not None
        try:
            return super().forward(images, targets)
        finally:
            for module, mode in zip(switched, before, strict=True):
                module.training = mode

    def outline(self, images: Tensor) -> Tensor:
        """Compute what a training step computes, for images [n, 3, H, W] on the meta device.

        Values cannot be sorted there, so each image gets the largest number of boxes, and of boxes
        with objects. Returns the sum of all outputs that the losses are made of.
        """
        features = self.backbone(images)
        outputs = [x for level in self.rpn.head(list(features.values())) for x in level]
        heads = self.roi_heads
        boxes = heads.fg_bg_sampler.batch_size_per_image
        objects = int(boxes * heads.fg_bg_sampler.positive_fraction)
        pooled = [
            images.new_zeros(count * len(images), self.backbone.out_channels, *pool.output_size)
            + sum(x.sum() for x in features.values())
            for count, pool in ((boxes, heads.box_roi_pool), (objects, heads.mask_roi_pool))
        ]
        outputs += heads.box_predictor(heads.box_head(pooled[0]))
        outputs.append(heads.mask_predictor(heads.mask_head(pooled[1])))
        return torch.stack([x.sum() for x in outputs]).sum()


def maskrcnn_resnet50_fpn(
    num_classes: int,
    min_size: int,
    max_size: int,
    *,
    backbone_weights: str | None = None,
    box_samples: int = 512,
    detections: int = 100,
) -> Detector:
    """Return torchvision's Mask R-CNN R-50-FPN, with frozen batch norm.

    Without ``backbone_weights`` all weights are random, and no layer normalizes activations. Each
    residual branch is then scaled to a fifth, because activations would otherwise double sixteen
    times and overflow. Such a model is good for measuring time, not for learning.

    Args:
        num_classes: Number of classes, including "nothing".
        min_size: Shorter side of an evaluated image.
        max_size: Longer side of an evaluated image, at most.
        backbone_weights: File with the state dict of a ResNet-50, as torchvision saves it (.pth,
            .pt) or in safetensors. The stem and the first stage are then frozen.
        box_samples: Boxes of an image that the heads are trained on.
        detections: Objects found in an image, at most.

    Raises:
        UsageError: The file does not fit.
    """
    trainable = 5 if backbone_weights is None else 3
    backbone = resnet_fpn_backbone(
        backbone_name="resnet50",
        weights=None,
        norm_layer=FrozenBatchNorm2d,
        trainable_layers=trainable,
    )
    if backbone_weights is None:
        # Only the last norm of a residual branch is scaled: it multiplies the whole branch.
        for block in (m for m in backbone.body.modules() if isinstance(m, Bottleneck)):
            block.bn3.weight.mul_(RESIDUAL_SCALE)
    elif not next(backbone.parameters()).is_meta:
        _load(backbone.body, Path(backbone_weights))
    return Detector(
        backbone,
        num_classes,
        min_size=min_size,
        max_size=max_size,
        _skip_resize=True,
        box_batch_size_per_image=box_samples,
        box_positive_fraction=POSITIVE_SHARE,
        box_detections_per_img=detections,
    )


def _load(body: nn.Module, path: Path) -> None:
    """Load the weights of a classifier, without its last layer."""
    state = weight_files.read(path, "model.backbone_weights")
    try:
        body.load_state_dict({k: v for k, v in state.items() if not k.startswith("fc.")})
    except RuntimeError as error:  # keys or shapes do not fit
        reason = " ".join(str(error).strip().split("\n")[:2])
        raise UsageError(
            f"model.backbone_weights={path}: no state dict of a ResNet-50 ({reason})"
        ) from None


TINY = (16, 32, 64)
"""Channels of the stages of the tiny backbone, at 1/4, 1/8 and 1/16 of the image."""


def maskrcnn_tiny(
    num_classes: int,
    min_size: int,
    max_size: int,
    *,
    box_samples: int = 32,
    detections: int = 20,
    width: int = 32,
    representation: int = 64,
) -> Detector:
    """Return a Mask R-CNN of 0.2 million weights, which learns drawn shapes in a minute.

    It has five convolutions with group norm, a pyramid of ``width`` channels at 1/4, 1/8, 1/16 and
    1/32 of the image, anchors of 16 to 128 pixels, and small heads.
    """
    stem = _stage(3, TINY[0])
    stages = [_stage(a, b) for a, b in zip((TINY[0], *TINY[:-1]), TINY, strict=True)]
    names = [f"stage{i}" for i in range(len(TINY))]
    body = nn.Sequential(OrderedDict(zip(["stem", *names], [stem, *stages], strict=True)))
    levels = {name: str(i) for i, name in enumerate(names)}
    backbone = BackboneWithFPN(body, levels, list(TINY), width)
    maps = list(levels.values())
    box_pool, mask_pool = (MultiScaleRoIAlign(maps, size, 2) for size in (5, 14))
    return Detector(
        backbone,
        min_size=min_size,
        max_size=max_size,
        _skip_resize=True,
        rpn_anchor_generator=AnchorGenerator(
            tuple((16 * 2**i,) for i in range(len(TINY) + 1)),
            ((0.5, 1.0, 2.0),) * (len(TINY) + 1),
        ),
        rpn_pre_nms_top_n_train=200,
        rpn_pre_nms_top_n_test=200,
        rpn_post_nms_top_n_train=100,
        rpn_post_nms_top_n_test=100,
        rpn_batch_size_per_image=64,
        box_batch_size_per_image=box_samples,
        box_positive_fraction=POSITIVE_SHARE,
        box_detections_per_img=detections,
        box_roi_pool=box_pool,
        box_head=TwoMLPHead(width * 5**2, representation),
        box_predictor=FastRCNNPredictor(representation, num_classes),
        mask_roi_pool=mask_pool,
        mask_head=MaskRCNNHeads(width, [width] * 2, 1),
        mask_predictor=MaskRCNNPredictor(width, width, num_classes),
    )


def _stage(inputs: int, outputs: int) -> nn.Module:
    """Return a convolution that halves the size, with group norm and ReLU."""
    conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(8, outputs), nn.ReLU())
