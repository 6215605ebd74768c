"""One class for each image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.tasks import TaskConfig

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data
    from kfac_bench.tasks.task import Task


@dataclass
class ClassificationConfig(TaskConfig):
    """Classification: one class for each image; metric: accuracy."""

    likelihood: ClassVar[str] = "categorical"

    def build(self, data: Data) -> Task:
        """See :meth:`TaskConfig.build`."""
        from kfac_bench.tasks.objectives.classification import Classification
        from kfac_bench.tasks.pictures import looks_of

        return Classification(self.label_smoothing, looks_of(data))
