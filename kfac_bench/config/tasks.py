"""What is learned."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from kfac_bench.config.options import RESULT, option

TASKS = (
    *("classification", "reconstruction", "segmentation", "detection"),
    *("pretraining", "question_answering", "language_model", "denoising"),
)


@dataclass
class TaskConfig:
    """What is learned, and the validation figure that a target is about."""

    name: str = option(MISSING, "task", RESULT, choices=TASKS)
    label_smoothing: float = option(0.0, "of the cross-entropy", RESULT, at_least=0, below=1)


@dataclass
class SegmentationConfig(TaskConfig):
    """Dice loss of a mask."""

    smooth: float = option(
        1.0, "pixels added to both sides of an image's Dice ratio", RESULT, above=0
    )
    bce: float = option(
        1.0,
        "weight of the binary cross entropy, mean over pixels, beside the Dice loss",
        RESULT,
        at_least=0,
    )


@dataclass
class DetectionConfig(TaskConfig):
    """Mask R-CNN's losses and COCO's mean precision.

    With a goal the figure is goals_met, the least share of a goal: trainer.target=1 stops the run
    when all are met.
    """

    bbox_goal: float | None = option(
        None,
        "bbox_mAP to reach; the figure is then the least share of a goal",
        RESULT,
        above=0,
        at_most=1,
    )
    segm_goal: float | None = option(None, "segm_mAP to reach", RESULT, above=0, at_most=1)


@dataclass
class QuestionAnsweringConfig(TaskConfig):
    """Where in a paragraph an answer begins and ends."""

    max_answer_tokens: int = option(30, "longest answer that is looked for", RESULT, at_least=1)
