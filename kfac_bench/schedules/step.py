"""A learning rate that falls at given epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from kfac_bench.config.options import RESULT, option
from kfac_bench.config.schedules import ScheduleConfig
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from kfac_bench.config.train import TrainConfig


@dataclass
class StepConfig(ScheduleConfig):
    """A rate that falls at given epochs, counted from the start of the run."""

    milestones: list[float] = option(
        [30.0, 60.0, 80.0], "epochs after which the rate is lower", RESULT
    )
    gamma: float = option(0.1, "factor at each milestone", RESULT, above=0, at_most=1)

    def after_warmup(self, step: int, warmup: int, steps_per_epoch: int, max_steps: int) -> float:
        """See :meth:`ScheduleConfig.after_warmup`."""
        passed = sum(step >= round(epochs * steps_per_epoch) for epochs in self.milestones)
        return float(self.gamma**passed)

    def check(self, config: TrainConfig) -> None:
        """See :meth:`Section.check`."""
        super().check(config)
        if not all(0 < a < b for a, b in pairwise([*self.milestones, math.inf])):
            raise UsageError(
                f"schedule.milestones={self.milestones}: must be epochs above 0 in rising order"
            )
