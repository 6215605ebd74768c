"""The clean image of a noisy one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.tasks import TaskConfig

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data
    from kfac_bench.tasks.task import Task


@dataclass
class DenoisingConfig(TaskConfig):
    """Denoising: the clean image from a noisy image; metric: PSNR."""

    likelihood: ClassVar[str] = "gaussian"

    def build(self, data: Data) -> Task:
        """See :meth:`TaskConfig.build`."""
        from kfac_bench.tasks.objectives.denoising import Denoising
        from kfac_bench.tasks.pictures import looks_of

        return Denoising(math.prod(data.shape), looks_of(data))
