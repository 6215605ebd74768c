"""Boxes and masks of objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.options import RESULT, option
from kfac_bench.config.tasks import TaskConfig
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from kfac_bench.config.train import TrainConfig
    from kfac_bench.data.images.coco_dataset import COCO
    from kfac_bench.tasks.task import Task


@dataclass
class DetectionConfig(TaskConfig):
    """Detection: boxes and masks of objects, with Mask R-CNN's losses; metric: COCO's precision.

    With a goal the metric is goals_met, the least share of a goal that is reached: with
    trainer.target=1 the run stops when all goals are met.
    """

    likelihood: ClassVar[str] = "none"

    bbox_goal: float | None = option(
        None,
        "bbox_mAP to reach; the metric is then the least share of a goal",
        RESULT,
        above=0,
        at_most=1,
    )
    segm_goal: float | None = option(None, "segm_mAP to reach", RESULT, above=0, at_most=1)

    def build(self, data: COCO) -> Task:
        """See :meth:`TaskConfig.build`."""
        from kfac_bench.tasks.objectives.detection import Detection
        from kfac_bench.tasks.pictures import looks_of

        return Detection(
            data.truth, data.num_classes, self.bbox_goal, self.segm_goal, looks_of(data)
        )

    def check(self, config: TrainConfig) -> None:
        """See :meth:`Section.check`."""
        super().check(config)
        if config.kfac.enabled and config.kfac.fisher != "empirical":
            raise UsageError(
                f"kfac.fisher={config.kfac.fisher} does not fit task=detection, whose losses have "
                "no common likelihood to draw labels from: use kfac.fisher=empirical"
            )
