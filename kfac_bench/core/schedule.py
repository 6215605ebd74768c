"""Options that may change during training, and which part of K-FAC is due at which step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

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
    early_updates: bool
    """True if the first interval is divided into short ones; see :meth:`interval`."""

    def at(self, step: int) -> Settings:
        """Return the values at ``step``.

        Raises:
            ValueError: A value is out of range.
        """
        damping = None if self.damping is None else self._value("damping", step)
        decay = self._value("factor_decay", step)
        kl_clip = None if self.kl_clip is None else self._value("kl_clip", step)
        if damping is not None and not 0 < damping < math.inf:
            raise ValueError(f"damping={damping} at step {step}: must be above 0 and finite")
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
        return self._part("factor_update_freq", step).start == step

    def slices_due(self, step: int, count: int) -> list[int]:
        """Return the slices, of ``count``, that are due in this step; all of them at step 0."""
        # The first step needs every decomposition: before it there is none.
        if step == 0:
            return list(range(count))
        steps = self.interval(step)
        # In the first interval the factors may still be those that step 0 decomposed.
        unchanged = isinstance(self.update_freq, Doubling) and (
            steps.stop <= self._part("factor_update_freq", 0).stop
        )
        if steps.start == 0 and (self._is_early(step) or unchanged):
            return []
        at = 0 if self._is_early(step) else step
        phases = slice_phases(count, len(steps), self._freq("factor_update_freq", at))
        return [i for i, phase in enumerate(phases) if step == steps[phase]]

    def interval(self, step: int) -> range:
        """Return the steps of the interval that ``step`` lies in; each slice is due once in it.

        An interval has ``update_freq`` steps. With ``early_updates`` the first interval is divided.
        The parts begin at 0, at a tenth of ``update_freq`` rounded up to a step that updates
        factors, and at 2, 4 and 8 times that step, as far as these are below ``update_freq``: at
        steps 10, 20, 40 and 80 if factors are updated every 10 steps and decomposed every 100.
        """
        if not self._is_early(step):
            return self._part("update_freq", step)
        factor_update_freq = self._freq("factor_update_freq", 0)
        tenth = self._freq("update_freq", 0) / 10
        start, end = 0, factor_update_freq * math.ceil(tenth / factor_update_freq)
        while end <= step:
            start, end = end, 2 * end
        return range(start, min(end, self._freq("update_freq", 0)))

    def _is_early(self, step: int) -> bool:
        """Return whether ``step`` lies in a first interval that is divided."""
        if isinstance(self.update_freq, Doubling):
            return False  # its first intervals are short already
        # If intervals are functions of the step, those of step 0 count. A function may also say
        # that the first interval has ended.
        first = min(self._freq("update_freq", 0), self._freq("update_freq", step))
        return self.early_updates and step < first > self._freq("factor_update_freq", 0)

    def slices_to_begin(self, step: int, count: int) -> dict[int, int]:
        """Return the slices, of ``count``, that begin beside training, with the step of their use.

        The first time, slices are used in the next step. Later each slice begins in the steps in
        which it is due. It has the time until the next slice begins: the length of the interval
        divided by ``count + 1``, rounded down, at least 1 step.
        """
        first = [i for i in range(count) if first_step(i, count) == step]
        if first:
            return dict.fromkeys(first, step + 1)
        delay = max(1, len(self.interval(step)) // (count + 1))
        return dict.fromkeys(self.slices_due(step, count), step + delay)

    def most_slices(self, layers: int) -> int:
        """Return the largest useful number of slices for ``layers`` layers.

        That is one slice for each free step of an interval (see :func:`count_free_phases`). If the
        interval is a function, it is one slice per factor.
        """
        # Slices are made once. If intervals change later, no fixed number of steps is known.
        if callable(self.update_freq) or callable(self.factor_update_freq):
            return 2 * layers
        first = self.at(0)
        return count_free_phases(first.update_freq, first.factor_update_freq)

    def _part(self, name: str, step: int) -> range:
        """Return the steps of the interval of a schedule that ``step`` lies in."""
        length, schedule = self._freq(name, step), getattr(self, name)
        if isinstance(schedule, Doubling):
            return schedule.part(step)
        start = step - step % length
        return range(start, start + length)

    def _freq(self, name: str, step: int) -> int:
        interval = self._value(name, step)
        if not 1 <= interval < math.inf or interval != int(interval):
            raise ValueError(f"{name}={interval:g} at step {step}: must be a whole number >= 1")
        return int(interval)

    def _value(self, name: str, step: int) -> float:
        schedule: Schedule = getattr(self, name)
        value = schedule(step) if callable(schedule) else schedule
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(
                f"{name}={value!r} at step {step}: must be a number, or a function from the step "
                "to a number"
            ) from None


@dataclass(frozen=True)
class Doubling:
    """An interval that grows: the first ones are an eighth, an eighth, a quarter and a half of it.

    With an interval of 40 steps, statistics are due at steps 0, 5, 10, 20, 40, 80, 120 and so on.
    Slices of decompositions are due in the steps between them. Parts of another interval are
    rounded down: with 20 steps, statistics are due at steps 0, 2, 5, 10, 20, 40.
    """

    interval: float

    def __call__(self, step: int) -> float:
        """Return the length of the interval at ``step``."""
        try:
            is_whole = 1 <= self.interval < math.inf and self.interval == int(self.interval)
        except TypeError:  # no number
            is_whole = False
        if not is_whole:
            return self.interval  # Schedules refuses this value
        return len(self.part(step))

    def part(self, step: int) -> range:
        """Return the steps of the interval that ``step`` lies in."""
        whole = int(self.interval)
        start, end = step - step % whole, step - step % whole + whole
        while start == 0 and end > max(1, whole // 8):
            if step >= end // 2:
                return range(end // 2, end)
            end //= 2
        return range(start, end)


@dataclass(frozen=True)
class Milestones:
    """A schedule whose value is multiplied by ``factor`` at each of some steps."""

    value: float
    factor: float
    steps: tuple[int, ...]

    def __call__(self, step: int) -> float:
        """Return the value at ``step``."""
        return self.value * self.factor ** sum(step >= each for each in self.steps)


FIRST_STEPS = 5
"""Steps in which all slices begin beside training for the first time."""


def first_step(index: int, count: int) -> int:
    """Return the step in which one of ``count`` slices begins beside training the first time.

    In each step from 0 on begin equally many slices, at least one.
    """
    return index // math.ceil(count / FIRST_STEPS)


def count_free_phases(update_freq: int, factor_update_freq: int) -> int:
    """Return the number of steps of an interval in which slices may run.

    A step with a factor update is long enough already, so the other steps are used. If every step
    has a factor update, all steps are used.
    """
    # A step of the interval meets a factor update in some interval if gcd divides it.
    common = math.gcd(update_freq, factor_update_freq)
    return update_freq - update_freq // common or update_freq


@lru_cache(maxsize=64)  # each step asks
def slice_phases(count: int, update_freq: int, factor_update_freq: int) -> Sequence[int]:
    """Return for each slice the step of the interval at which it runs.

    A single slice runs at the beginning of the interval.
    """
    if count == 1:
        return [0]
    free = count_free_phases(update_freq, factor_update_freq)
    numbers = [i * free // count for i in range(count)]
    if free == update_freq:
        return numbers
    between = math.gcd(update_freq, factor_update_freq) - 1  # free steps after each factor update
    return [n + n // between + 1 for n in numbers]
