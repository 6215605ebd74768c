"""The learning-rate schedules: the options of each, and its rate at each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfac_bench.config.groups import ScheduleConfig
from kfac_bench.config.options import RESULT, check_rising, option
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from kfac_bench.config.train import TrainConfig


@dataclass
class ConstantConfig(ScheduleConfig):
    """The same rate until the end of the run."""

    def after_warmup(self, step: int, warmup: int, steps_per_epoch: int, max_steps: int) -> float:
        return 1.0


@dataclass
class PolynomialConfig(ScheduleConfig):
    """A rate that falls until the last step that trainer.max_steps and max_epochs allow."""

    end: float = option(0.0, "factor at the end", RESULT, at_least=0, at_most=1)
    decay_until: float = option(
        1.0, "share of the run at which the rate stops falling", RESULT, above=0, at_most=1
    )
    decay_from: str = option(
        "warmup",
        "where the fall starts: at the end of the warm-up, or at the start of the run (the rate "
        "then jumps at the end of the warm-up)",
        RESULT,
        choices=("warmup", "start"),
    )
    power: float = option(1.0, "power of the curve from 1 to 0", RESULT, above=0)

    def check(self, config: TrainConfig) -> None:
        """See :meth:`Section.check`."""
        super().check(config)
        if self.decay_from == "warmup" and self.warmup_share >= self.decay_until:
            raise UsageError(
                f"schedule.decay_until={self.decay_until:g} is before the end of the warm-up "
                f"(schedule.warmup_share={self.warmup_share:g}), so the rate would fall to "
                "schedule.end at once"
            )

    def notes(self, steps_per_epoch: int, max_steps: int) -> list[str]:
        """See :meth:`ScheduleConfig.notes`."""
        warmup, end = self.warmup_steps(steps_per_epoch, max_steps), self.decay_until * max_steps
        if not warmup or not end <= warmup <= max_steps or self.decay_from == "start":
            return super().notes(steps_per_epoch, max_steps)
        return [
            f"the warm-up of the learning rate ends at step {warmup}, when the rate should have "
            f"stopped falling (step {end:.0f}), so the rate falls to schedule.end at once"
        ]

    def after_warmup(self, step: int, warmup: int, steps_per_epoch: int, max_steps: int) -> float:
        start = warmup if self.decay_from == "warmup" else 0
        length = self.decay_until * max_steps - start
        left = min(1.0, max(0.0, 1 - (step - start) / max(1.0, length)))
        return float(self.end + (1 - self.end) * self.curve(left) ** self.power)

    def curve(self, left: float) -> float:
        """Return the factor where the share ``left`` of the fall is left, before the power."""
        return left


@dataclass
class CosineConfig(PolynomialConfig):
    """A rate that falls as half a cosine, with the options of ``schedule=polynomial``."""

    def curve(self, left: float) -> float:
        return 0.5 - 0.5 * math.cos(math.pi * left)


@dataclass
class StepConfig(ScheduleConfig):
    """A rate that falls at given epochs, counted from the start of the run."""

    milestones: list[float] = option(
        [30.0, 60.0, 80.0], "epochs after which the rate is lower", RESULT
    )
    gamma: float = option(0.1, "factor at each milestone", RESULT, above=0, at_most=1)

    def after_warmup(self, step: int, warmup: int, steps_per_epoch: int, max_steps: int) -> float:
        passed = sum(step >= round(epochs * steps_per_epoch) for epochs in self.milestones)
        return float(self.gamma**passed)

    def notes(self, steps_per_epoch: int, max_steps: int) -> list[str]:
        """See :meth:`ScheduleConfig.notes`."""
        notes = super().notes(steps_per_epoch, max_steps)
        if self.milestones and round(self.milestones[0] * steps_per_epoch) >= max_steps:
            notes.append(
                f"the run ends before the first of schedule.milestones={self.milestones} (in "
                f"epochs), at epoch {max_steps / steps_per_epoch:.3g}, so the rate never falls"
            )
        return notes

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        check_rising("schedule.milestones", self.milestones)


CHOICES: Mapping[str, type[ScheduleConfig]] = {
    "constant": ConstantConfig,
    "cosine": CosineConfig,
    "polynomial": PolynomialConfig,
    "step": StepConfig,
}
