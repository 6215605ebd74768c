"""The learning rate over time."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from kfac_bench.config.options import RESULT, option


@dataclass
class ScheduleConfig:
    """``optimizer.lr`` times a factor, a function of the step alone."""

    name: str = option(
        MISSING, "after the warm-up", RESULT, choices=("constant", "step", "cosine", "polynomial")
    )
    warmup_epochs: float = option(
        0.0, "epochs in which the rate rises linearly", RESULT, at_least=0
    )
    warmup_share: float = option(
        0.0, "of all steps, in which the rate rises linearly", RESULT, at_least=0, below=1
    )
    warmup_start: float = option(
        0.0, "factor that the rise starts from", RESULT, at_least=0, at_most=1
    )
    base_batch_size: int | None = option(
        None,
        "examples per step that optimizer.lr is meant for: scaled linearly to trainer.batch_size; "
        "null: taken as it is",
        RESULT,
        at_least=1,
    )


@dataclass
class StepScheduleConfig(ScheduleConfig):
    """Falls at given epochs."""

    milestones: list[float] = option(
        [30.0, 60.0, 80.0], "epochs after which the rate is lower", RESULT
    )
    gamma: float = option(0.1, "factor at each milestone", RESULT, above=0, at_most=1)


@dataclass
class DecayScheduleConfig(ScheduleConfig):
    """Falls until the last step that trainer.max_steps and max_epochs allow, or before."""

    end: float = option(0.0, "factor at the end", RESULT, at_least=0, at_most=1)
    decay_until: float = option(
        1.0,
        "share of the run after which the fall is over and the rate stays",
        RESULT,
        above=0,
        at_most=1,
    )
    decay_from: str = option(
        "warmup",
        "where the fall is counted from: its end, or the run's start (then the rate jumps there)",
        RESULT,
        choices=("warmup", "start"),
    )
    power: float = option(1.0, "that the curve from 1 to 0 is raised to", RESULT, above=0)
