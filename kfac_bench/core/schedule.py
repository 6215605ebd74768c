"""Options that may change during training, and which part of K-FAC is due at which step."""

import math
from collections.abc import Callable
from dataclasses import dataclass

Schedule = float | Callable[[int], float]
"""A number, or a function from the step (0 is the first) to a number."""


@dataclass(frozen=True)
class Settings:
    """The values of all schedules at one step."""

    damping: float | None
    """None: relative to the mean eigenvalue of each layer."""
    kl_clip: float | None
    factor_decay: float
    update_freq: int
    factor_update_freq: int


@dataclass
class Schedules:
    """The schedules of a :class:`KFAC`, by the names of its options."""

    damping: Schedule | None
    kl_clip: Schedule | None
    factor_decay: Schedule
    update_freq: Schedule
    factor_update_freq: Schedule

    def at(self, step: int) -> Settings:
        """Return the values at ``step``.

        Raises:
            ValueError: A value is out of range.
        """
        damping = None if self.damping is None else _at(self.damping, step)
        decay = _at(self.factor_decay, step)
        kl_clip = None if self.kl_clip is None else _at(self.kl_clip, step)
        if damping is not None and not damping > 0:
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
        """Return whether A and G are updated in this step."""
        return step % self._freq("factor_update_freq", step) == 0

    def slices_due(self, step: int, count: int) -> list[int]:
        """Return which of ``count`` slices of the decompositions are due; all of them at step 0."""
        # The first step needs every decomposition: before it there is none.
        if step == 0:
            return list(range(count))
        update_freq = self._freq("update_freq", step)
        phases = slice_phases(count, update_freq, self._freq("factor_update_freq", step))
        return [i for i, phase in enumerate(phases) if step % update_freq == phase]

    def slices_to_begin(self, step: int, count: int) -> dict[int, int]:
        """Return which of ``count`` slices begin beside training, and at which step each is used.

        The first time, slices are used in the next step. Later each slice begins in the steps in
        which it is due. It has the time until the next slice begins: ``update_freq / (count + 1)``
        steps, rounded down, at least 1.
        """
        first = [i for i in range(count) if first_step(i, count) == step]
        if first:
            return dict.fromkeys(first, step + 1)
        delay = max(1, self._freq("update_freq", step) // (count + 1))
        return dict.fromkeys(self.slices_due(step, count), step + delay)

    def most_slices(self, layers: int) -> int:
        """Return the largest useful number of slices for ``layers`` layers.

        That is one slice for each free step of an interval (see :func:`free_phases`). If the
        interval is a function, it is one slice per factor.
        """
        # Slices are made once. If intervals change later, no fixed number of steps is known.
        if callable(self.update_freq) or callable(self.factor_update_freq):
            return 2 * layers
        first = self.at(0)
        return len(free_phases(first.update_freq, first.factor_update_freq))

    def _freq(self, name: str, step: int) -> int:
        interval = _at(getattr(self, name), step)
        if not 1 <= interval < math.inf or interval != int(interval):
            raise ValueError(f"{name}={interval} at step {step}: must be a whole number >= 1")
        return int(interval)


FIRST_STEPS = 5
"""Steps in which all slices begin beside training for the first time."""


def first_step(index: int, count: int) -> int:
    """Return the step in which one of ``count`` slices begins beside training the first time.

    In each step from 0 on begin equally many slices, at least one.
    """
    return index // math.ceil(count / FIRST_STEPS)


def free_phases(update_freq: int, factor_update_freq: int) -> list[int]:
    """Return the steps of an interval in which slices may run.

    A step with a factor update is long enough already, so the other steps are used. If every step
    has a factor update, all steps are used.
    """
    # A step of the interval meets a factor update in some interval if gcd divides it.
    common = math.gcd(update_freq, factor_update_freq)
    free = [i for i in range(update_freq) if i % common]
    return free or list(range(update_freq))


def slice_phases(count: int, update_freq: int, factor_update_freq: int) -> list[int]:
    """Return for each slice the step of the interval at which it runs.

    A single slice runs at the beginning of the interval.
    """
    if count == 1:
        return [0]
    phases = free_phases(update_freq, factor_update_freq)
    return [phases[i * len(phases) // count] for i in range(count)]


def _at(schedule: Schedule, step: int) -> float:
    return float(schedule(step) if callable(schedule) else schedule)
