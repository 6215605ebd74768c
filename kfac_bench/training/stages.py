"""Seconds of the stages of K-FAC, as an event records them: means over steps and ranks."""

from collections import defaultdict

import torch

from kfac_bench.core import KFAC
from kfac_bench.distributed.ranks import Ranks


class StageTimes:
    """The sums of :attr:`KFAC.stage_s` since the last event.

    Each step counts, so a stage that runs every hundred steps is seen even if events are rare.
    """

    def __init__(self, kfac: KFAC, ranks: Ranks) -> None:
        self._kfac, self._ranks = kfac, ranks
        self._kinds = kfac.stage_names
        self._steps = 0
        self._total_s: dict[str, float] = defaultdict(float)

    def add(self) -> None:
        """Count the step that has just ended."""
        self._steps += 1
        for kind, seconds in self._kfac.stage_s.items():
            self._total_s[kind] += seconds

    def mean_s(self) -> dict[str, float]:
        """Return mean seconds per step since the last call, by kind of op. All ranks call this."""
        each = [self._total_s[kind] / max(1, self._steps) for kind in self._kinds]
        self._steps = 0
        self._total_s.clear()
        # All ranks have the same names in the same order, so one message carries all means.
        mean = torch.tensor(each, dtype=torch.float64, device=self._ranks.device)
        mean = self._ranks.sum(mean) / self._ranks.world_size
        return dict(zip(self._kinds, mean.tolist(), strict=True))
