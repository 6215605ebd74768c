"""The input as its own target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.tasks import TaskConfig

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data
    from kfac_bench.tasks.task import Task


@dataclass
class ReconstructionConfig(TaskConfig):
    """Reconstruction: the input is its own target; metric: squared error of an image."""

    likelihood: ClassVar[str] = "gaussian"

    def build(self, data: Data) -> Task:
        """See :meth:`TaskConfig.build`."""
        from kfac_bench.tasks.objectives.reconstruction import Reconstruction
        from kfac_bench.tasks.pictures import looks_of

        return Reconstruction(looks_of(data))
