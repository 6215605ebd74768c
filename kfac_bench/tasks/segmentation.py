"""One mask for each image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.options import RESULT, option
from kfac_bench.config.tasks import TaskConfig

if TYPE_CHECKING:
    from kfac_bench.data.images.lgg import LGG
    from kfac_bench.tasks.task import Task


@dataclass
class SegmentationConfig(TaskConfig):
    """Segmentation: one mask for each image, with a Dice loss; metric: Dice of a volume."""

    likelihood: ClassVar[str] = "bernoulli"

    smooth: float = option(
        1.0, "pixels added to both sides of an image's Dice ratio", RESULT, above=0
    )
    bce: float = option(
        1.0,
        "weight of the binary cross entropy (mean over pixels) beside the Dice loss",
        RESULT,
        at_least=0,
    )

    def build(self, data: LGG) -> Task:
        """See :meth:`TaskConfig.build`."""
        from kfac_bench.tasks.objectives.segmentation import Segmentation

        return Segmentation(data.eval_volumes, self.smooth, self.bce)
