"""``spaces NAME``: the ranges of a contest, centred by the trials of a pilot.

The rule is the same for every optimizer. The pilot has equally many trials for each of them, in
wide ranges. Of each task it takes the fastest trial. The new range of an option reaches from the
smallest of these values divided by 1.5 to the largest times 1.5, and does not leave the old range.
Options without a ``log`` range stay as they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.contest.interpolated import reached
from benchmarks.contest.packed_runs import PackedRun
from benchmarks.contest.result_store import ResultStore
from benchmarks.contest.sitting import factors, tasks_of
from kfac_bench.benchmark.schema import Benchmark
from kfac_bench.errors import UsageError

MARGIN = 1.5

Ranges = dict[str, dict[str, dict[str, list[float]]]]
"""Optimizer to option to ``{"log": [low, high]}``."""


def centred(benchmark: Benchmark, store: ResultStore) -> Ranges:
    """Return the new ranges of every optimizer.

    Raises:
        UsageError: Trials are missing, or an optimizer has met the target of no task.
    """
    tuning = benchmark.tuning
    assert tuning is not None
    found: Ranges = {}
    for optimizer in benchmark.axes["optimizer"]:
        winners = []
        for task in tasks_of(benchmark):
            trials = [r for r in store.runs(task, "trial") if r.optimizer == optimizer]
            if len(trials) < tuning.trials * len(tuning.seeds):
                raise UsageError(f"{task}, {optimizer}: trials are missing; run study first")
            winners += _winner(trials, factors(store.runs(task, "baseline")))
        if not winners:
            raise UsageError(f"{optimizer}: no trial met a target, so its ranges are wrong")
        space = {name: value for name, value in tuning.space[optimizer].items() if _is_log(value)}
        found[optimizer] = {
            name: {"log": _range(value["log"], [float(w[name]) for w in winners])}
            for name, value in space.items()
        }
    return found


def _winner(trials: Sequence[PackedRun], speed: Mapping[str, float]) -> list[Mapping[str, Any]]:
    """Return the settings of the fastest trial; none if all missed the target."""
    best = min(trials, key=lambda run: reached(run).seconds * speed.get(run.sitting, 1.0))
    return [best.settings] if reached(best).seconds < float("inf") else []


def _is_log(value: object) -> bool:
    return isinstance(value, Mapping) and "log" in value


def _range(old: Sequence[float], values: Sequence[float]) -> list[float]:
    low, high = max(old[0], min(values) / MARGIN), min(old[1], max(values) * MARGIN)
    return [float(f"{value:.2g}") for value in (low, high)]
