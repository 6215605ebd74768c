"""Which part of K-FAC is due at which step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Schedule = float | Callable[[int], float]
"""A number, or a function of the step (0 at the first)."""


@dataclass(frozen=True)
class Settings:
    """The schedules' values at one step."""

    damping: float
    kl_clip: float | None
    factor_decay: float
    update_freq: int
    factor_update_freq: int


@dataclass
class Schedules:
    """Reads and checks schedules."""

    damping: Schedule
    kl_clip: Schedule | None
    factor_decay: Schedule
    update_freq: Schedule
    factor_update_freq: Schedule

    def at(self, step: int) -> Settings:
        """Values at ``step``; ``ValueError`` if one is out of range."""
        damping, decay = _at(self.damping, step), _at(self.factor_decay, step)
        kl_clip = None if self.kl_clip is None else _at(self.kl_clip, step)
        if not damping > 0:
            raise ValueError(f"damping={damping} at step {step}: must be above 0")
        if kl_clip is not None and not kl_clip > 0:
            raise ValueError(f"kl_clip={kl_clip} at step {step}: must be above 0")
        if not 0 <= decay < 1:
            raise ValueError(f"factor_decay={decay} at step {step}: must be in [0, 1)")
        return Settings(
            damping,
            kl_clip,
            decay,
            self._freq("update_freq", step),
            self._freq("factor_update_freq", step),
        )

    def factors_due(self, step: int) -> bool:
        """Whether the statistics of this step count."""
        return step % self._freq("factor_update_freq", step) == 0

    def slices_due(self, step: int, count: int) -> list[int]:
        """Which of ``count`` slices of the decompositions are due; all of them at step 0."""
        if step == 0:
            return list(range(count))
        update_freq = self._freq("update_freq", step)
        phases = slice_phases(count, update_freq, self._freq("factor_update_freq", step))
        return [i for i, phase in enumerate(phases) if step % update_freq == phase]

    def most_slices(self, layers: int) -> int:
        """One for each step of an interval that is free; any number where intervals change."""
        if callable(self.update_freq) or callable(self.factor_update_freq):
            return 2 * layers
        first = self.at(0)
        return len(free_phases(first.update_freq, first.factor_update_freq))

    def _freq(self, name: str, step: int) -> int:
        interval = _at(getattr(self, name), step)
        if not 1 <= interval < math.inf or interval != int(interval):
            raise ValueError(f"{name}={interval} at step {step}: must be a whole number >= 1")
        return int(interval)


def free_phases(update_freq: int, factor_update_freq: int) -> list[int]:
    """Steps of every interval without a factor update, which is work enough; or all of them."""
    common = math.gcd(update_freq, factor_update_freq)
    free = [i for i in range(update_freq) if i % common]
    return free or list(range(update_freq))


def slice_phases(count: int, update_freq: int, factor_update_freq: int) -> list[int]:
    """The step of an interval at which each slice runs; one slice alone at its beginning."""
    if count == 1:
        return [0]
    phases = free_phases(update_freq, factor_update_freq)
    return [phases[i * len(phases) // count] for i in range(count)]


def _at(schedule: Schedule, step: int) -> float:
    return float(schedule(step) if callable(schedule) else schedule)
