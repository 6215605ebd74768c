"""What all schedules have in common: the base class of a schedule's options, with the warm-up."""

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from kfac_bench.config.options import RESULT, Section, option
from kfac_bench.config.registry import SCHEDULES
from kfac_bench.errors import UsageError


@dataclass
class ScheduleConfig(Section):
    """The learning rate over time: ``optimizer.lr`` times a factor.

    The factor is a pure function of the step, so a resumed run continues exactly.
    """

    name: str = option(MISSING, "shape after the warm-up", RESULT, choices=SCHEDULES)
    warmup_epochs: float = option(
        0.0, "epochs in which the rate rises linearly", RESULT, at_least=0
    )
    warmup_share: float = option(
        0.0, "share of all steps in which the rate rises linearly", RESULT, at_least=0, below=1
    )
    warmup_start: float = option(
        0.0, "factor at the start of the warm-up", RESULT, at_least=0, at_most=1
    )
    base_batch_size: int | None = option(
        None,
        "batch size that optimizer.lr is meant for: the rate is scaled linearly to "
        "trainer.batch_size; null: no scaling",
        RESULT,
        at_least=1,
    )

    def factor(self, step: int, steps_per_epoch: int, max_steps: int, batch_size: int) -> float:
        """Return what ``optimizer.lr`` is multiplied by in the update after ``step`` updates.

        The linear scaling with the batch size and the gradual warm-up follow Goyal et al. (2017),
        sections 2.1 and 2.2. The n-th of n updates of the warm-up already has the full rate.
        """
        scale = 1.0 if self.base_batch_size is None else batch_size / self.base_batch_size
        warmup = self.warmup_steps(steps_per_epoch, max_steps)
        if step < warmup:
            rise = (1 - self.warmup_start) * (step + 1) / warmup
            return scale * (self.warmup_start + rise)
        return scale * self.after_warmup(step, warmup, steps_per_epoch, max_steps)

    def warmup_steps(self, steps_per_epoch: int, max_steps: int) -> int:
        """Return the number of updates in which the rate rises."""
        if self.warmup_share:
            return round(self.warmup_share * max_steps)
        return round(self.warmup_epochs * steps_per_epoch)

    def after_warmup(self, step: int, warmup: int, steps_per_epoch: int, max_steps: int) -> float:
        """Return the factor in the update after ``step`` updates, without the batch's scaling.

        Args:
            step: Updates done, at least ``warmup``.
            warmup: Updates of the warm-up.
            steps_per_epoch: Updates of one epoch.
            max_steps: Updates of the whole run.
        """
        raise NotImplementedError

    def check(self, config: Any) -> None:
        """See :meth:`Section.check`."""
        if self.warmup_epochs and self.warmup_share:
            raise UsageError(
                f"schedule.warmup_epochs={self.warmup_epochs:g} and "
                f"schedule.warmup_share={self.warmup_share:g} both set the length of the warm-up: "
                "set one of them to 0"
            )
