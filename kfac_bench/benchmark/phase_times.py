"""The training seconds of earlier runs, such as the phases of a pre-training.

The runs are those of :class:`~kfac_bench.benchmark.schema.Before`, in runs/shared, from which cells
start. :mod:`~kfac_bench.benchmark.suite` loads them, and :mod:`~kfac_bench.benchmark.result`
compares their times. Nothing here trains: a run that has not ended has no number.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path

from kfac_bench.benchmark import measures, run_end
from kfac_bench.benchmark.schema import Quantity, fill_in
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Evaluated, Trained
from kfac_bench.record.runs import Run, load, number, option

PhaseRuns = Mapping[tuple[str, int], Run]
"""Runs by the text of their run id before it is filled in, and by the seed."""


def load_phases(
    quantities: Mapping[str, Quantity], shared: Path, profile: str, seeds: Sequence[int]
) -> PhaseRuns:
    """Return the runs that the quantities name, as far as they have ended well."""
    texts = {text for each in quantities.values() for text in (*each.phases, *each.than)}
    result = {}
    for text in texts:
        for seed in set(seeds):
            folder = shared / fill_in(text, {"profile": profile, "seed": str(seed)})
            try:
                if run_end.ended(folder) is not None:
                    result[text, seed] = load(folder)
            except UsageError:
                continue  # A damaged file has no number, as a run that has not ended.
    return result


def percent_less(quantity: Quantity, cell: Run, seed: int, runs: PhaseRuns) -> float:
    """Return how much less training time the phases took than the other runs, in percent.

    If the cell starts from a checkpoint of a phase, the phase counts up to this checkpoint. NaN if
    a run is missing.
    """
    if any((text, seed) not in runs for text in (*quantity.phases, *quantity.than)):
        return math.nan
    weights = str(option(cell.started.config, "model", "weights"))
    own = [_seconds(runs[text, seed], weights) for text in quantity.phases]
    other = [measures.train_s(runs[text, seed], None) for text in quantity.than]
    # A run that failed has no time of a whole phase.
    if not math.isfinite(sum(own) + sum(other)) or sum(other) <= 0:
        return math.nan
    return 100 * (1 - sum(own) / sum(other))


def _seconds(run: Run, weights: str) -> float:
    """Return the training seconds of a phase, up to the checkpoint ``weights`` if it is its own."""
    checkpoint = re.search(r"([^/]+)/checkpoints/step-(\d+)/?$", weights)
    if checkpoint is None or checkpoint[1] != run.path.parent.name:
        return measures.train_s(run, None)
    return _seconds_at(run, int(checkpoint[2]))


def _seconds_at(run: Run, step: int) -> float:
    """Return the training seconds at a step, between the events before and after the step."""
    recorded = (each for each in run.events if isinstance(each, Trained | Evaluated))
    times = {each.step: number(each.train_s) for each in recorded}
    steps = sorted(times)
    after = bisect_left(steps, step)
    if after == len(steps):
        return math.nan
    if steps[after] == step or after == 0:
        return times[step] if steps[after] == step else math.nan
    low, high = steps[after - 1], steps[after]
    share = (step - low) / (high - low)
    return times[low] + share * (times[high] - times[low])
