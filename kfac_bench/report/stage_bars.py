"""The mean time of K-FAC's stages in each setting, from the runs' events."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kfac_bench.record.events import Trained
from kfac_bench.record.runs import Setting, number, plain

MOST_STAGES = 8
"""Number of stages that the page shows by name. It sums up the cheaper stages as "other"."""


@dataclass(frozen=True)
class StageBars:
    """Mean milliseconds of a step by stage, for each setting whose runs recorded stages."""

    names: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float]]]

    @property
    def longest(self) -> float:
        """The largest sum of a row, above zero."""
        return max(sum(means) for _, means in self.rows)


def stage_bars(settings: Sequence[Setting]) -> StageBars | None:
    """Return the bars of one task, the most expensive stage first; None if no run has stages."""
    found = {s.optimizer: means for s in settings if sum((means := _means_ms(s)).values()) > 0}
    if not found:
        return None
    total: dict[str, float] = {}
    for means in found.values():
        for name, value in means.items():
            total[name] = total.get(name, 0.0) + value
    names = sorted((name for name in total if total[name] > 0), key=lambda n: (-total[n], n))
    named, others = names[:MOST_STAGES], names[MOST_STAGES:]
    rows = []
    for setting, means in found.items():
        row = [means.get(name, 0.0) for name in named]
        rows.append((setting, row + ([sum(means.get(n, 0.0) for n in others)] if others else [])))
    return StageBars([plain(name) for name in named] + (["other"] if others else []), rows)


def _means_ms(setting: Setting) -> dict[str, float]:
    """Return the mean over all steps of all runs.

    The means of an event hold for the steps since the event before, so they weigh as many steps.
    """
    steps, total = 0, dict[str, float]()
    for run in setting.runs:
        before = 0
        for event in run.events:
            if not isinstance(event, Trained):
                continue
            here, before = event.step - before, event.step
            # Event files are not trusted: steps may run backwards, means may be no mapping.
            if not isinstance(event.stage_mean_s, Mapping) or not event.stage_mean_s or here <= 0:
                continue
            steps += here
            for name, value in event.stage_mean_s.items():
                seconds = number(value)
                if math.isfinite(seconds) and seconds > 0:
                    total[name] = total.get(name, 0.0) + here * seconds
    return {name: 1e3 * value / steps for name, value in total.items()}
