"""From a run's events to one number: what the quantities of a benchmark may measure.

Times are of the training clock, which stands still in evaluations. A target that was missed is
``inf``; NaN is what a run that ended well has no number for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean

from kfac_bench.record import score
from kfac_bench.record.events import Evaluated, RunEnded, Trained
from kfac_bench.record.runs import Run, number, option, target

Level = float | None
"""The figure that the profile asks about; None: none."""


def final(run: Run, level: Level) -> float:
    """The task's own figure at the last evaluation."""
    return score.final_metric(run)


def _reached(run: Run, level: Level) -> tuple[float, float, float]:
    """(step, seconds, epoch) of the first evaluation at the level; inf if there is none."""
    if level is None:
        return math.nan, math.nan, math.nan
    for event in run.events:
        if not isinstance(event, Evaluated):
            continue
        value = number(event.metrics.get(run.started.metric))
        if value >= level if run.started.higher_is_better else value <= level:
            return number(event.step), number(event.train_s), number(event.epoch)
    return math.inf, math.inf, math.inf


def steps_to_target(run: Run, level: Level) -> float:
    """NaN where the run had no target."""
    return math.nan if target(run) is None else score.steps_to_target(run)


def seconds_to_target(run: Run, level: Level) -> float:
    """NaN where the run had no target."""
    return math.nan if target(run) is None else score.time_to_target_s(run)


def epochs_to_target(run: Run, level: Level) -> float:
    """Of the evaluation that met the target."""
    steps = steps_to_target(run, level)
    if not math.isfinite(steps):
        return steps
    found = [e.epoch for e in run.events if isinstance(e, Evaluated) and e.step == steps]
    return number(found[-1]) if found else math.nan


def train_s(run: Run, level: Level) -> float:
    """Of the whole training."""
    ended = [e for e in run.events if isinstance(e, RunEnded)]
    return number(ended[-1].train_s) if ended else math.nan


def _pace(run: Run) -> tuple[float, float]:
    """Seconds of a step and of an epoch, from the first Trained event to the last.

    What comes before the first one, such as the first use of each kernel, is left out.
    """
    found = [e for e in run.events if isinstance(e, Trained)]
    if len(found) < 2 or found[-1].step <= found[0].step:
        return math.nan, math.nan
    seconds = number(found[-1].train_s) - number(found[0].train_s)
    epochs = number(found[-1].epoch) - number(found[0].epoch)
    steps = found[-1].step - found[0].step
    return seconds / steps, seconds / epochs if epochs > 0 else math.nan


def _ranks(run: Run) -> float:
    return number(run.started.environment.get("world_size", 1))


def _rate(run: Run, level: Level) -> float:
    batch = number(option(run.started.config, "trainer", "batch_size"))
    return batch / _pace(run)[0] / _ranks(run)


def update_extra_s(run: Run, level: Level) -> float:
    """K-FAC's seconds in a step that decomposes; of events of every step."""
    found = [
        sum(map(number, e.stage_s.values()))
        for e in run.events
        if isinstance(e, Trained) and number(e.stage_s.get("Decompose", 0.0)) > 0
    ]
    return fmean(found) if found else math.nan


def _stage_ms(run: Run, kind: str) -> float:
    """Mean milliseconds of a stage in the steps that had it, the first one left out."""
    found = [
        1e3 * number(e.stage_s[kind])
        for e in run.events
        if isinstance(e, Trained) and number(e.stage_s.get(kind, 0.0)) > 0
    ]
    return fmean(found[1:] or found) if found else math.nan


MEASURES: Mapping[str, Callable[[Run, Level], float]] = {
    "final": final,
    "steps_to_target": steps_to_target,
    "seconds_to_target": seconds_to_target,
    "epochs_to_target": epochs_to_target,
    "steps_to_level": lambda run, level: _reached(run, level)[0],
    "seconds_to_level": lambda run, level: _reached(run, level)[1],
    "epochs_to_level": lambda run, level: _reached(run, level)[2],
    "train_s": train_s,
    "ms_per_step": lambda run, level: 1e3 * _pace(run)[0],
    "epoch_s": lambda run, level: _pace(run)[1],
    "examples_per_s_per_rank": _rate,
    "steps_per_s_per_rank": lambda run, level: 1 / _pace(run)[0] / _ranks(run),
    "update_extra_s": update_extra_s,
}
COMPUTED = frozenset(
    {
        "state_mb",
        "factors_mb",
        "decompositions_mb",
        "peak_mb",
        "wire_mb_per_step",
        "messages_per_step",
        "gflop_per_step",
        "parameters_mb",
        "payload_mb",
        "batch",
        "kfac_mb",
        "activations_mb_per_example",
        "weights_mb",
    }
)
"""What only computed cells have."""


def exists(name: str) -> bool:
    """Whether a benchmark may ask for it."""
    return name in MEASURES or name in COMPUTED or name.startswith(("metric ", "stage "))


def measure(run: Run, name: str, level: Level) -> float:
    """The number of that name; a computed cell has it by name. NaN: there is none."""
    if "computed" in run.started.config:
        return _last_metric(run, name)
    if name in MEASURES:
        return MEASURES[name](run, level)
    kind, _, what = name.partition(" ")
    if kind == "metric":
        return _last_metric(run, what)
    if name == "stage share":  # the longest message of comm_opt, or of layer_wise
        share = _stage_ms(run, "ShareDecompositions")
        return _stage_ms(run, "ShareGradients") if math.isnan(share) else share
    return _stage_ms(run, what) if kind == "stage" else math.nan


def _last_metric(run: Run, name: str) -> float:
    evaluations = [e for e in run.events if isinstance(e, Evaluated)]
    found = evaluations[-1].metrics if evaluations else {}
    return number(found[name]) if isinstance(found, Mapping) and name in found else math.nan
