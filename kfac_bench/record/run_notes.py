"""What a reader of a table of runs must know: failed runs, repeated seeds, other machines."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from kfac_bench.record.events import RecordGap, RunEnded
from kfac_bench.record.lost_events import lost_events
from kfac_bench.record.runs import (
    Run,
    Setting,
    clock,
    differences,
    flatten,
    number,
    plain,
    seed,
    target,
)
from kfac_bench.record.score import status, target_reached

# Parts of a run's environment that differ between any two runs and say nothing about speed.
OWN_TO_A_RUN = frozenset({"command", "slurm_job_id"})


def notes(settings: Sequence[Setting]) -> list[str]:
    """Return what a reader of the table must know: failed runs, repeated seeds, other machines."""
    found = []
    for setting in settings:
        name = f"{setting.task}, {setting.optimizer}"
        for run in setting.runs:
            dead = status(run) not in ("reached", "finished") and target_reached(run) is None
            if dead:
                counts = "" if target(run) is None else ": counts as not reached"
                found.append(f"{name}: {plain(run.path.parent.name)} {_ending(run)}{counts}")
            gaps = [event for event in run.events if isinstance(event, RecordGap)]
            if gaps:
                where = f"before step {number(gaps[-1].step):.0f}"
                found.append(
                    f"{name}: the record of {plain(run.path.parent.name)} has a gap {where}"
                )
            elif lost := lost_events(run.path.parent):
                found.append(f"{name}: {plain(run.path.parent.name)}: {lost}")
        seeds = Counter(seed(run) for run in setting.runs)
        found += [f"{name}: seed {s} was run {n} times" for s, n in seeds.items() if n > 1]
    if any(clock(run) == "cpu" for setting in settings for run in setting.runs):
        found.append("seconds are processor time, not time of day (trainer.clock=cpu)")
    by_task: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for setting in settings:
        by_task[setting.task] += [flatten(run.started.environment) for run in setting.runs]
    for task, environments in by_task.items():
        if unequal := [k for k in differences(environments) if k not in OWN_TO_A_RUN]:
            found.append(f"{task}: the runs' environments differ in {', '.join(unequal)}")
    return found


def _ending(run: Run) -> str:
    ended = [e for e in run.events if isinstance(e, RunEnded)]
    if not ended:
        return f"has not ended (last event at step {number(run.events[-1].step):.0f})"
    message = plain(ended[-1].message)
    return f"ended as {status(run)}" + (f" ({message})" if message else "")
