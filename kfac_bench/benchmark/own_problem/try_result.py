"""The results of a study of ``kfac-bench try`` on fresh seeds, and the winner among them.

One optimizer counts as faster than another only if the intervals of their median times do not
overlap, over at least :data:`LEAST_SEEDS` seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kfac_bench.record.score import median_with_interval

LEAST_SEEDS = 3
"""With fewer seeds nothing is shown: their ranges are too narrow."""


@dataclass(frozen=True)
class SeedRun:
    """A run on a fresh seed."""

    seed: int
    time_s: float
    """Training seconds to the target; inf if it was missed."""
    steps: float
    curve: Sequence[tuple[float, float]]
    """Training seconds and metric of each evaluation."""


@dataclass(frozen=True)
class Finalist:
    """An optimizer with the setting that won its tuning."""

    name: str
    runs: Sequence[SeedRun]
    limit_s: float
    """Training seconds that each run had."""
    paste: str
    """Lines for the user's script."""
    uses_kfac: bool = False
    step_s: float = math.nan
    """Seconds of a step."""
    memory_bytes: float = math.nan
    """Peak memory of a rank."""
    stages_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of K-FAC's stages in all steps of all runs."""

    @property
    def times_s(self) -> tuple[float, float, float]:
        """Median and interval of the seconds to target."""
        return median_with_interval([run.time_s for run in self.runs])

    @property
    def least_s(self) -> float:
        """The low end of the interval, if each miss had reached the target just after its limit."""
        return median_with_interval([min(run.time_s, self.limit_s) for run in self.runs])[1]

    @property
    def reached(self) -> int:
        """The number of seeds that reached the target."""
        return sum(math.isfinite(run.time_s) for run in self.runs)


@dataclass(frozen=True)
class TryResult:
    """The results of a study."""

    problem: str
    metric: str
    higher_is_better: bool
    target: float
    reference: Finalist
    """AdamW."""
    rivals: Sequence[Finalist]
    seeds: int
    """Number of planned seeds."""
    is_own_target: bool = False
    """True if the study fixed the target, because the problem has none."""
    reference_steps: int = 1000
    """Steps of AdamW that have fixed this target."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Optimizers that did not run on fresh seeds, with the reason."""
    has_tried_kfac: bool = True
    """True if an optimizer with K-FAC was tuned."""
    minutes: float = 30
    is_quick: bool = False

    @property
    def finalists(self) -> list[Finalist]:
        """All finalists, the fastest first."""
        return sorted([*self.rivals, self.reference], key=lambda f: f.times_s[0])

    @property
    def winner(self) -> Finalist | None:
        """The optimizer with the smallest median of those that are shown to beat AdamW.

        None if no optimizer is. The smallest median of all may belong to an optimizer whose seeds
        differ too much.
        """
        if min(len(f.runs) for f in self.finalists) < LEAST_SEEDS:
            return None
        return next((f for f in self.finalists if is_faster(f, self.reference)), None)


def is_faster(one: Finalist, other: Finalist) -> bool:
    """Return whether the intervals do not overlap, in favour of the first."""
    return one.times_s[2] < other.least_s
