"""What a comparison of runs shows, in one sentence per task: figures and pages begin with it."""

import math
from collections.abc import Sequence

from kfac_bench.record.runs import Setting, has_kfac, plain, target
from kfac_bench.record.score import Row, row

LEVEL = 1.05
"""Two medians whose ratio is below this number are about equal."""


def finding(settings: Sequence[Setting]) -> str:
    """Return the sentence that compares K-FAC with the best other optimizer of one task.

    It is empty if there is no target, or no setting to compare with.
    """
    goal = target(settings[0].runs[0])
    with_kfac = [s for s in settings if has_kfac(s.runs[0])]
    others = [s for s in settings if not has_kfac(s.runs[0])]
    if goal is None or not with_kfac or not others:
        return ""
    ours, best = _fastest(with_kfac), _fastest(others)
    name = "K-FAC" if len(with_kfac) == 1 else plain(ours.optimizer)
    rival, metric = plain(best.optimizer), f"{goal:.12g}"
    ours_s, best_s = ours.seconds.median, best.seconds.median
    if any(math.isinf(each.seconds.median) and each.reached for each in (ours, best)):
        # At least half of the seeds missed the target, but not all.
        return f"{name} reaches {metric} {_on_seeds(ours)}, {rival} {_on_seeds(best)}"
    if math.isinf(ours_s):
        if math.isinf(best_s):
            return f"No optimizer reaches {metric}"
        return f"{rival} reaches {metric}, {name} does not"
    if math.isinf(best_s):
        return f"Only {name} reaches {metric}"
    if min(ours_s, best_s) <= 0 or _level(ours, best):
        return f"{name} and {rival} need about the same time to {metric}"
    if ours_s < best_s:
        return f"{name} reaches {metric} {best_s / ours_s:.1f}x faster than {rival}"
    return f"{rival} reaches {metric} {ours_s / best_s:.1f}x faster than {name}"


def _fastest(settings: Sequence[Setting]) -> Row:
    """Return the row with the shortest median time; of misses the one with the most good seeds."""
    rows = [row(setting) for setting in settings]
    return min(rows, key=lambda line: (line.seconds.median, -line.reached / line.seeds))


def _on_seeds(line: Row) -> str:
    return f"on {line.reached} of {line.seeds} seeds"


def _level(one: Row, other: Row) -> bool:
    """Whether the medians are about equal, or each median lies within the seeds of the other."""
    fast, slow = sorted((one, other), key=lambda line: line.seconds.median)
    if slow.seconds.median < LEVEL * fast.seconds.median:
        return True
    # Seeds differ by more than the medians do: the difference may be chance.
    return fast.seconds.high > slow.seconds.median and slow.seconds.low < fast.seconds.median
