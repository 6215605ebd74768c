"""Seconds of K-FAC's stages as an event tells them: means over steps and ranks."""

from __future__ import annotations

from collections import defaultdict

import torch

from kfac_bench.core import KFAC
from kfac_bench.distributed.ranks import Ranks


class StageTimes:
    """Adds up :attr:`KFAC.stage_s`, step by step, until somebody asks.

    A stage that runs every hundred steps is thus seen, however seldom events are.
    """

    def __init__(self, kfac: KFAC, ranks: Ranks) -> None:
        self._kfac, self._ranks = kfac, ranks
        self._kinds = kfac.stage_names
        self._steps = 0
        self._total_s: dict[str, float] = defaultdict(float)

    def add(self) -> None:
        """Count the step that was just made."""
        self._steps += 1
        for kind, seconds in self._kfac.stage_s.items():
            self._total_s[kind] += seconds

    def mean_s(self) -> dict[str, float]:
        """By kind of op, of a step, since the last call; all ranks call it."""
        each = [self._total_s[kind] / max(1, self._steps) for kind in self._kinds]
        self._steps = 0
        self._total_s.clear()
        mean = torch.tensor(each, dtype=torch.float64, device=self._ranks.device)
        mean = self._ranks.sum(mean) / self._ranks.world_size
        return dict(zip(self._kinds, mean.tolist(), strict=True))
