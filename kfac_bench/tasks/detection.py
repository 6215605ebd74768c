"""Detection: a box, a class and a mask of each object in an image."""

import contextlib
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import UNKNOWN, ImageDisplay
from kfac_bench.data.images.coco_annotations import CocoImage
from kfac_bench.data.images.coco_masks import decode, encode, to_rle
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.tasks import pictures
from kfac_bench.tasks.task import Evaluation, Prediction

LOSSES = ("loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg")
METRICS = ("mAP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")
"""The first metrics of COCO's summary, in its order: the mean over IoU 0.5 to 0.95, at 0.5, at
0.75; then of objects below 32 x 32 pixels, up to 96 x 96 pixels, and above."""

TRUE, FOUND = (255, 225, 25), (240, 50, 230)
"""Yellow and magenta, as in segmentation."""


class Detection:
    """The sum of Mask R-CNN's losses, as in torchvision, and COCO's mean average precision.

    A batch is a list of images [3, H, W] in [0, 1] and a list of target dictionaries. Each loss is
    a mean: ``loss_classifier`` (cross entropy in nats) and ``loss_box_reg`` (smooth L1) over the
    sampled boxes of all images of the batch, ``loss_mask`` (binary cross entropy in nats) over the
    pixels of the sampled boxes that hold objects, the two losses of region proposals over sampled
    anchors.

    So "the mean over the batch" that K-FAC undoes is a mean over boxes in the box head, and a mean
    over boxes with objects in the mask head: these boxes are the rows of the inputs of the layers.
    Over ranks, A and G are means over the boxes of all ranks. The loss and its gradient, however,
    are means over ranks (and parts of a batch) of their own means, as in the reference, so a box
    weighs more on a rank with few boxes. A step without objects has no statistics of the mask head.

    The metrics are those of COCO's evaluator (pycocotools), in [0, 1], exact on any number of
    ranks: ``bbox_mAP``, ``bbox_AP50``, ... and ``segm_mAP``, ... A size without any object in
    ``truth`` has no metric. A target refers to ``bbox_mAP`` or, if there are goals, to
    ``goals_met``: the smaller of ``bbox_mAP / bbox_goal`` and ``segm_mAP / segm_goal``. With the
    target 1 a run stops when both goals are reached.

    The losses are not the negative log likelihood of one output, so the Fisher is the empirical
    one.
    """

    def __init__(
        self,
        truth: Sequence[CocoImage],
        num_classes: int,
        bbox_goal: float | None = None,
        segm_goal: float | None = None,
        looks: ImageDisplay = UNKNOWN,
    ) -> None:
        self.goals = {
            name: goal
            for name, goal in (("bbox_mAP", bbox_goal), ("segm_mAP", segm_goal))
            if goal is not None
        }
        self.metric = "goals_met" if self.goals else "bbox_mAP"
        self.higher_is_better = True
        self.likelihood = "none"
        self._truth = truth
        self._num_classes = num_classes
        self._looks = looks

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses, and the five :data:`LOSSES` stacked."""
        images, targets = batch
        losses = model(images, targets)
        each = torch.stack([losses[name] for name in LOSSES])
        return each.sum(), each

    def evaluation(self) -> Evaluation:
        """Start a pass that collects the objects found."""
        return _DetectionPass(self)

    @torch.no_grad()
    def show(self, model: nn.Module, batch: Batch, count: int) -> list[Prediction]:
        """Return the first images with boxes and masks of true and of found objects.

        The ten likeliest objects with a score of at least one half are shown. The captions name
        them.
        """
        truth = {picture.id: picture for picture in self._truth}
        shown = []
        for image, target in list(zip(*batch, strict=True))[:count]:
            picture = pictures.fit(pictures.to_rgb(image, self._looks))
            there = truth[int(target["image_id"])].instances
            size = (image.shape[1], image.shape[2])
            for thing, mask in zip(
                there, decode([x.segmentation for x in there], *size), strict=True
            ):
                picture = _drawn(picture, thing.corners(*size), mask, TRUE, 3)
            (output,) = model([image])
            found = (output["scores"] >= 0.5).nonzero().flatten()[:10].tolist()
            for i in found:
                mask = (output["masks"][i, 0] >= 0.5).to(torch.uint8).cpu().numpy()
                picture = _drawn(picture, output["boxes"][i].tolist(), mask, FOUND, 2)
            said = ", ".join(
                f"{self._name(int(output['labels'][i]))} {output['scores'][i].item():.2f}"
                for i in found
            )
            true = ", ".join(self._name(x.label) for x in there)
            caption = f"found (magenta): {said or 'nothing'}; there (yellow): {true or 'nothing'}"
            shown.append(Prediction(caption, picture))
        return shown

    def _name(self, label: int) -> str:
        return dict(enumerate(self._looks.classes)).get(label, f"class {label}")

    def metrics(self, found: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Return the metrics from the :func:`found_in` of all images, in any order."""
        metrics: dict[str, float] = {}
        for kind in ("bbox", "segm"):
            metrics |= _evaluate(self._truth, self._num_classes, found, kind)
        if self.goals:
            met = min(metrics[name] / goal for name, goal in self.goals.items())
            metrics = {"goals_met": met} | metrics
        return metrics


def _drawn(
    picture: Any, corners: Sequence[float], mask: Any, colour: tuple[int, int, int], width: int
) -> Any:
    """Return the picture with the outlines of a mask [H, W] and of its box."""
    box = np.zeros_like(mask)
    x1, y1, x2, y2 = (round(v) for v in corners)
    box[y1 : max(y2, y1 + 1), x1 : max(x2, x1 + 1)] = 1
    for inside in (box, mask):
        picture = pictures.outline(picture, pictures.fit(inside), colour, width)
    return picture


class _DetectionPass:
    """A pass over the evaluation set that keeps the objects found in each image."""

    def __init__(self, task: Detection) -> None:
        self._task = task
        self._found: list[dict[str, Any]] = []

    def add(self, model: nn.Module, batch: Batch) -> None:
        """Look for objects in each image alone, because padding would change the result."""
        for image, target in zip(*batch, strict=True):
            (output,) = model([image])
            self._found.append(found_in(int(target["image_id"]), output))

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Return the metrics; COCO's evaluator runs on rank 0."""
        gathered = ranks.gather(json.dumps(self._found).encode())
        metrics = b""
        if ranks.is_main:
            found = [image for part in gathered for image in json.loads(part)]
            metrics = json.dumps(self._task.metrics(found)).encode()
        shared: dict[str, float] = json.loads(ranks.gather(metrics)[0])
        return shared


def found_in(image_id: int, output: dict[str, Tensor]) -> dict[str, Any]:
    """Return the objects that the model found in an image, as JSON.

    The keys are ``labels``, ``scores``, ``bboxes`` (x, y, width, height in pixels), the run lengths
    ``counts`` of the masks, and the ``size`` of the image. A pixel belongs to an object if its
    probability is at least one half.
    """
    masks = (output["masks"][:, 0] >= 0.5).to(torch.uint8).cpu().numpy()
    corners = output["boxes"].double().cpu()
    bboxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1)
    return {
        "image_id": image_id,
        "size": list(masks.shape[1:]),
        "labels": output["labels"].tolist(),
        "scores": output["scores"].tolist(),
        "bboxes": bboxes.tolist(),
        "counts": [rle["counts"].decode("ascii") for rle in encode(masks)],
    }


def _evaluate(
    truth: Sequence[CocoImage], num_classes: int, found: Sequence[dict[str, Any]], kind: str
) -> dict[str, float]:
    """Return the metrics of COCO's evaluator for boxes (bbox) or masks (segm)."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    tables = []
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        for annotations in (_true_annotations(truth, kind), _found_annotations(found, kind)):
            table = COCO()
            table.dataset = {
                "images": [{"id": p.id, "height": p.height, "width": p.width} for p in truth],
                "categories": [{"id": label} for label in range(1, num_classes)],
                "annotations": annotations,
            }
            table.createIndex()
            tables.append(table)
        evaluator = COCOeval(*tables, iouType=kind)
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    stats = zip(METRICS, np.asarray(evaluator.stats).tolist(), strict=False)
    # The evaluator says -1 for a size without objects.
    return {f"{kind}_{name}": value for name, value in stats if value >= 0}


def _true_annotations(truth: Sequence[CocoImage], kind: str) -> list[dict[str, Any]]:
    """Return the true objects as the evaluator takes them.

    Ids start at 1, because the evaluator takes a match with id 0 for no match.
    """
    return [
        {
            "id": id,
            "image_id": picture.id,
            "category_id": thing.label,
            "bbox": list(thing.bbox),
            "area": thing.area,
            "iscrowd": int(thing.crowd),
            "segmentation": to_rle(thing.segmentation, picture.height, picture.width)
            if kind == "segm"
            else None,
        }
        for id, (picture, thing) in enumerate(((p, x) for p in truth for x in p.instances), start=1)
    ]


def _found_annotations(found: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the found objects as the evaluator takes them.

    The area of an object is the area of its box for bbox, and of its mask for segm.
    """
    from pycocotools import mask

    annotations: list[dict[str, Any]] = []
    for image in sorted(found, key=lambda image: int(image["image_id"])):
        columns = (image[name] for name in ("labels", "scores", "bboxes", "counts"))
        for label, score, bbox, counts in zip(*columns, strict=True):
            rle = {"size": image["size"], "counts": counts}
            area = bbox[2] * bbox[3] if kind == "bbox" else float(mask.area(rle))
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image["image_id"],
                    "category_id": label,
                    "score": score,
                    "bbox": bbox,
                    "area": area,
                    "iscrowd": 0,
                    "segmentation": rle,
                }
            )
    return annotations
