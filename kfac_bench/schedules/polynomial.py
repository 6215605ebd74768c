"""A learning rate that falls as a power of the share of steps that are left."""

from dataclasses import dataclass

from kfac_bench.config.options import RESULT, option
from kfac_bench.config.schedules import ScheduleConfig


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

    def after_warmup(self, step: int, warmup: int, steps_per_epoch: int, max_steps: int) -> float:
        """See :meth:`ScheduleConfig.after_warmup`."""
        start = warmup if self.decay_from == "warmup" else 0
        length = self.decay_until * max_steps - start
        left = min(1.0, max(0.0, 1 - (step - start) / max(1.0, length)))
        return float(self.end + (1 - self.end) * self.curve(left) ** self.power)

    def curve(self, left: float) -> float:
        """Return the factor where the share ``left`` of the fall is left, before the power."""
        return left
