"""Measures: from the events of a run to one number, for the quantities of a benchmark.

Times are those of the training clock, which stands still during evaluations. ``inf`` is a miss: a
missed target, or the metric or the training seconds of a run that failed. NaN means that a run
which ended well has no such number.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from kfac_bench.benchmark import run_end
from kfac_bench.benchmark.schema import Quantity, fill_in
from kfac_bench.errors import UsageError
from kfac_bench.record import score
from kfac_bench.record.events import Evaluated, Trained
from kfac_bench.record.runs import Run, load, number, option, target, was_computed

Level = float | None
"""The level of the metric that a profile asks for; None: it asks for no level."""


def final(run: Run, level: Level) -> float:
    """Return the task's metric at the last evaluation; inf if the run diverged or failed."""
    return _inf_if_failed(run, score.final_metric(run))


def _inf_if_failed(run: Run, value: float) -> float:
    """Return inf for a run that failed on the way, and for a metric that is not a number."""
    return math.inf if score.status(run) == "failed" or math.isnan(value) else value


def _reached(run: Run, level: Level) -> tuple[float, float, float]:
    """Return (step, seconds, epoch) of the first evaluation at the level; inf if none met it."""
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
    """Return the steps to the run's target; NaN if the run had no target."""
    return math.nan if target(run) is None else score.steps_to_target(run)


def seconds_to_target(run: Run, level: Level) -> float:
    """Return the seconds to the run's target; NaN if the run had no target."""
    return math.nan if target(run) is None else score.time_to_target_s(run)


def targets_per_s_per_rank(run: Run, level: Level) -> float:
    """Return 1 / (ranks * seconds to the target); inf for a missed target."""
    seconds = seconds_to_target(run, level)
    return math.inf if math.isinf(seconds) else _per(1, seconds) / _ranks(run)


def epochs_to_target(run: Run, level: Level) -> float:
    """Return the epoch of the evaluation that met the target."""
    steps = steps_to_target(run, level)
    if not math.isfinite(steps):
        return steps
    epochs = [e.epoch for e in run.events if isinstance(e, Evaluated) and e.step == steps]
    return number(epochs[-1]) if epochs else math.nan


def train_s(run: Run, level: Level) -> float:
    """Return the seconds of the whole training; inf if the run failed on the way."""
    return _inf_if_failed(run, number(run.ended.train_s)) if run.ended else math.nan


def seconds_at_least(run: Run, name: str) -> float:
    """Return a lower bound of the seconds that a run would have needed, for a run that missed.

    It is the time that the run trained. Runs that failed have no bound, and neither have other
    measures than ``seconds_to_...``: inf.
    """
    seconds = train_s(run, None) if name.startswith("seconds_to_") else math.inf
    return seconds if seconds > 0 else math.inf


def _ranks(run: Run) -> float:
    ranks = number(run.started.environment.get("world_size", 1))
    return ranks if ranks > 0 else math.nan


def _per(amount: float, seconds: float) -> float:
    """Return an amount per second; NaN for no seconds, as of a target that step 0 has met."""
    return amount / seconds if seconds > 0 else math.nan


def _rate(run: Run, level: Level) -> float:
    # The configured batch is that of all ranks.
    batch = number(option(run.started.config, "trainer", "batch_size"))
    return _per(batch, run.pace[0]) / _ranks(run)


def update_extra_s(run: Run, level: Level) -> float:
    """Return K-FAC's mean seconds in a step that decomposes. The run must log every step."""
    seconds = [
        sum(map(number, e.stage_s.values()))
        for e in run.trained
        if number(e.stage_s.get("Decompose", 0.0)) > 0
    ]
    return fmean(seconds) if seconds else math.nan


def _stage_ms(run: Run, kind: str) -> float:
    """Return the mean milliseconds of a stage in the steps that ran it, without the first one."""
    times_ms = [
        1e3 * number(e.stage_s[kind]) for e in run.trained if number(e.stage_s.get(kind, 0.0)) > 0
    ]
    return fmean(times_ms[1:] or times_ms) if times_ms else math.nan


MEASURES: Mapping[str, Callable[[Run, Level], float]] = {
    "final": final,
    "steps_to_target": steps_to_target,
    "seconds_to_target": seconds_to_target,
    "epochs_to_target": epochs_to_target,
    "targets_per_s_per_rank": targets_per_s_per_rank,
    "steps_to_level": lambda run, level: _reached(run, level)[0],
    "seconds_to_level": lambda run, level: _reached(run, level)[1],
    "epochs_to_level": lambda run, level: _reached(run, level)[2],
    "train_s": train_s,
    "ms_per_step": lambda run, level: 1e3 * run.pace[0],
    "epoch_s": lambda run, level: run.pace[1],
    "examples_per_s_per_rank": _rate,
    "steps_per_s_per_rank": lambda run, level: _per(1, run.pace[0]) / _ranks(run),
    "update_extra_s": update_extra_s,
}
COMPUTED = frozenset(
    {
        "state_mb",
        "peak_mb",
        "wire_mb_per_step",
        "messages_per_step",
        "batch",
        "kfac_mb",
        "activations_mb_per_example",
        "weights_mb",
        "both_phases_s",
        "less_phase2_time",
        "less_time",
        "fewer_phase1_steps",
        "fewer_phase2_steps",
    }
)
"""Names of numbers that only computed cells have."""


def exists(name: str) -> bool:
    """Return whether a benchmark may ask for this measure."""
    return name in MEASURES or name in COMPUTED or name.startswith(("metric ", "stage "))


def measure(run: Run, name: str, level: Level) -> float:
    """Return the number that `name` measures; NaN if the run has no such number."""
    if was_computed(run):  # A computed cell has each number by its name.
        return number(_last_metrics(run).get(name))
    if name in MEASURES:
        return MEASURES[name](run, level)
    # "metric NAME" is a metric of the last evaluation, "stage KIND" a kind of op.
    kind, _, what = name.partition(" ")
    if kind == "metric":
        metrics = _last_metrics(run)
        return _inf_if_failed(run, number(metrics[what])) if what in metrics else math.nan
    if name == "stage share":  # The longest message: decompositions in comm_opt, else gradients.
        share = _stage_ms(run, "ShareDecompositions")
        return _stage_ms(run, "ShareGradients") if math.isnan(share) else share
    return _stage_ms(run, what) if kind == "stage" else math.nan


def _last_metrics(run: Run) -> Mapping[str, float]:
    evaluations = [e for e in run.events if isinstance(e, Evaluated)]
    return evaluations[-1].metrics if evaluations else {}


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
    """Return the percentage of training time that the phases save compared with the other runs.

    If the cell starts from a checkpoint of a phase, the phase counts up to this checkpoint. NaN if
    a run is missing.
    """
    if any((text, seed) not in runs for text in (*quantity.phases, *quantity.than)):
        return math.nan
    weights = str(option(cell.started.config, "model", "weights"))
    own = [_phase_s(runs[text, seed], weights) for text in quantity.phases]
    other = [train_s(runs[text, seed], None) for text in quantity.than]
    # A run that failed has no time of a whole phase.
    if not math.isfinite(sum(own) + sum(other)) or sum(other) <= 0:
        return math.nan
    return 100 * (1 - sum(own) / sum(other))


def _phase_s(run: Run, weights: str) -> float:
    """Return the training seconds of a phase, up to the checkpoint ``weights`` if it is its own."""
    checkpoint = re.search(r"([^/]+)/checkpoints/step-(\d+)/?$", weights)
    if checkpoint is None or checkpoint[1] != run.path.parent.name:
        return train_s(run, None)
    return _phase_s_at(run, int(checkpoint[2]))


def _phase_s_at(run: Run, step: int) -> float:
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
