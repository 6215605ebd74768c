"""A constant learning rate."""

from dataclasses import dataclass

from kfac_bench.config.schedules import ScheduleConfig


@dataclass
class ConstantConfig(ScheduleConfig):
    """The same rate until the end of the run."""

    def after_warmup(self, step: int, warmup: int, steps_per_epoch: int, max_steps: int) -> float:
        """See :meth:`ScheduleConfig.after_warmup`."""
        return 1.0
