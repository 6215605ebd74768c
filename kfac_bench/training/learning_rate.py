"""The learning rate of each step: a pure function, so that a resumed run goes on exactly."""

from __future__ import annotations

import math

from kfac_bench.config import DecayScheduleConfig, ScheduleConfig, StepScheduleConfig


def factor(
    config: ScheduleConfig, step: int, steps_per_epoch: int, max_steps: int, batch_size: int
) -> float:
    """What ``optimizer.lr`` is multiplied by in the update after ``step`` updates.

    Linear scaling with the batch and the gradual warm-up are those of Goyal et al. (2017), 2.1 and
    2.2: the first update has 1 / n of the way from ``warmup_start`` to 1, the n-th all of it.
    """
    scale = 1.0 if config.base_batch_size is None else batch_size / config.base_batch_size
    warmup = warmup_steps(config, steps_per_epoch, max_steps)
    if step < warmup:
        start = config.warmup_start
        return scale * (start + (1 - start) * (step + 1) / warmup)
    return scale * _after_warmup(config, step, warmup, steps_per_epoch, max_steps)


def warmup_steps(config: ScheduleConfig, steps_per_epoch: int, max_steps: int) -> int:
    """How many updates the rate rises for."""
    if config.warmup_share:
        return round(config.warmup_share * max_steps)
    return round(config.warmup_epochs * steps_per_epoch)


def _after_warmup(
    config: ScheduleConfig, step: int, warmup: int, steps_per_epoch: int, max_steps: int
) -> float:
    if isinstance(config, StepScheduleConfig):
        passed = sum(step >= round(epochs * steps_per_epoch) for epochs in config.milestones)
        return float(config.gamma**passed)
    if isinstance(config, DecayScheduleConfig):
        start = warmup if config.decay_from == "warmup" else 0
        length = config.decay_until * max_steps - start
        left = min(1.0, max(0.0, 1 - (step - start) / max(1.0, length)))
        shape = 0.5 - 0.5 * math.cos(math.pi * left) if config.name == "cosine" else left
        return float(config.end + (1 - config.end) * shape**config.power)
    return 1.0
