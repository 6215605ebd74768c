"""How fast the machine of each sitting was, from the baseline run that each sitting repeats.

A baseline does the same work each time: one optimizer, one seed, a fixed number of steps and no
target. So its seconds depend on the machine alone. All functions are pure.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median

from kfac_bench.record import score
from kfac_bench.record.events import RunEnded
from kfac_bench.record.packed_runs import PackedRun


def seconds_by_sitting(baselines: Iterable[PackedRun]) -> dict[str, list[float]]:
    """Return the baselines' training seconds by sitting, the first sitting first.

    Names of sittings begin with the time, so their order is that of the time. A baseline that did
    not do its work has no seconds.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for run in baselines:
        ended = [e for e in run.events if isinstance(e, RunEnded) and e.status == "finished"]
        if ended and math.isfinite(ended[-1].train_s) and ended[-1].train_s > 0:
            found[run.sitting].append(ended[-1].train_s)
    return dict(sorted(found.items()))


def factors(baselines: Iterable[PackedRun]) -> dict[str, float]:
    """Return by sitting what its seconds are multiplied by, to be seconds of the first sitting.

    With a single sitting the factor is 1, so that seconds are what the clock showed.
    """
    medians = {name: median(values) for name, values in seconds_by_sitting(baselines).items()}
    first = next(iter(medians.values()), 1.0)
    return {name: first / seconds for name, seconds in medians.items()}


def comparable_time_s(run: PackedRun, speed: Mapping[str, float]) -> float:
    """Return the training seconds to target, as the first sitting's machine would have taken.

    A miss is infinite. The seconds of a sitting without a baseline stay as they are.
    """
    # A damaged clock may give a negative time, for which a ratio has no meaning.
    return max(0.0, score.time_to_target_s(run)) * speed.get(run.sitting, 1.0)
