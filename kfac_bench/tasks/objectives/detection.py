"""Things in images: a box, a class and a mask of each."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import UNKNOWN, Looks
from kfac_bench.data.images.coco_annotations import CocoImage
from kfac_bench.data.images.coco_masks import decode, encode, to_rle
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.tasks import pictures
from kfac_bench.tasks.evaluation import Evaluation
from kfac_bench.tasks.prediction import Prediction

LOSSES = ("loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg")
FIGURES = ("mAP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")
"""The first of COCO's summary, in its order: over IoU 0.5 to 0.95, at 0.5, at 0.75; of things
below 32 x 32 pixels, up to 96 x 96, above."""

TRUE, FOUND = (255, 225, 25), (240, 50, 230)
"""Yellow and magenta, as in segmentation."""


class Detection:
    """Mask R-CNN's losses, added up as torchvision and the reference do; COCO's mean precision.

    Images are [3, H, W] in [0, 1] in a list, targets dictionaries in another. ``loss_classifier``
    (cross entropy in nats) and ``loss_box_reg`` (smooth L1) are means over the boxes sampled of
    all images of the batch, ``loss_mask`` (binary cross entropy in nats) over the pixels of those
    sampled boxes that are of things, the region proposals' two over sampled anchors.

    So "the mean over the batch" that K-FAC undoes is, in the box head, a mean over boxes and, in
    the mask head, over boxes of things: those are the rows of these layers' inputs, however many
    an image has. Over ranks, A and G are means over all ranks' boxes; but the loss and its
    gradient are means over ranks (and parts of a batch) of their own means, as in the reference: a
    box of a rank with few weighs more. A step without a thing has no statistics of the mask head.

    Metrics: of COCO's evaluator (pycocotools), exact on any number of ranks, in [0, 1]:
    ``bbox_mAP``, ``bbox_AP50``, ... and ``segm_mAP``, ...; ``truth`` is what it compares with. A
    size of which there is nothing has no figure. The metric that a target is about is
    ``bbox_mAP``, or, where goals are given, ``goals_met``: the least of ``bbox_mAP / bbox_goal``
    and ``segm_mAP / segm_goal``. With the target 1 a run stops when both are reached.

    The losses are no negative log likelihood of one output: there is the empirical Fisher alone.
    """

    def __init__(
        self,
        truth: Sequence[CocoImage],
        num_classes: int,
        bbox_goal: float | None = None,
        segm_goal: float | None = None,
        looks: Looks = UNKNOWN,
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
        """Return the sum of the losses; and the five :data:`LOSSES`, stacked."""
        images, targets = batch
        losses = model(images, targets)
        each = torch.stack([losses[name] for name in LOSSES])
        return each.sum(), each

    def evaluation(self) -> Evaluation:
        """A pass that collects what is found."""
        return _Pass(self)

    @torch.no_grad()
    def show(self, model: nn.Module, batch: Batch, count: int) -> list[Prediction]:
        """Return the first images with boxes and masks of what is there and what is found.

        Found is what has a score of one half or more: the likeliest ten. Captions name it.
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

    def figures(self, found: Sequence[dict[str, Any]]) -> dict[str, float]:
        """The metrics, from what is found in each image (:func:`found_in`), in any order."""
        figures: dict[str, float] = {}
        for kind in ("bbox", "segm"):
            figures |= _evaluate(self._truth, self._num_classes, found, kind)
        if self.goals:
            met = min(figures[name] / goal for name, goal in self.goals.items())
            figures = {"goals_met": met} | figures
        return figures


def _drawn(
    picture: Any, corners: Sequence[float], mask: Any, colour: tuple[int, int, int], width: int
) -> Any:
    """With the outlines of a mask [H, W] and of the box around it."""
    box = np.zeros_like(mask)
    x1, y1, x2, y2 = (round(v) for v in corners)
    box[y1 : max(y2, y1 + 1), x1 : max(x2, x1 + 1)] = 1
    for inside in (box, mask):
        picture = pictures.outline(picture, pictures.fit(inside), colour, width)
    return picture


class _Pass:
    def __init__(self, task: Detection) -> None:
        self._task = task
        self._found: list[dict[str, Any]] = []

    def add(self, model: nn.Module, batch: Batch) -> None:
        """Each image alone: padded to another's size, it would be seen otherwise."""
        images, targets = batch
        if not images:  # it could not be read, and ranks in lockstep count forwards
            model([torch.zeros(3, 64, 64, device=next(model.parameters()).device)])
        for image, target in zip(images, targets, strict=True):
            (output,) = model([image])
            self._found.append(found_in(int(target["image_id"]), output))

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """The evaluator runs on rank 0."""
        gathered = ranks.gather(json.dumps(self._found).encode())
        figures = b""
        if ranks.is_main:
            found = [image for part in gathered for image in json.loads(part)]
            figures = json.dumps(self._task.figures(found)).encode()
        metrics: dict[str, float] = json.loads(ranks.gather(figures)[0])
        return metrics


def found_in(image_id: int, output: dict[str, Tensor]) -> dict[str, Any]:
    """What the model found in an image, as JSON.

    ``labels``, ``scores``, ``bboxes`` (x, y, width, height in pixels), and of masks the run lengths
    ``counts`` and the image's ``size``; a pixel is of a thing from a probability of one half on.
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
    """Figures of COCO's evaluator for boxes (bbox) or masks (segm)."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    tables = []
    with contextlib.redirect_stdout(io.StringIO()):  # it prints
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
    stats = zip(FIGURES, np.asarray(evaluator.stats).tolist(), strict=False)
    return {f"{kind}_{name}": value for name, value in stats if value >= 0}  # -1: nothing there


def _true_annotations(truth: Sequence[CocoImage], kind: str) -> list[dict[str, Any]]:
    """As the evaluator takes them; ids from 1 on, for it takes a match with 0 for none."""
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
    """A box's area is its own in bbox, its mask's in segm."""
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
