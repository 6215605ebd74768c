"""``kfac-bench contest NAME``: the tables of a contest of optimizers, from packed results alone.

Nothing is composed or trained here, so the tables can be made on any machine, at any time.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from kfac_bench.benchmark import machine_speed, performance_profile, score_interval
from kfac_bench.benchmark.performance_profile import TAU_MAX
from kfac_bench.benchmark.result_store import ResultStore
from kfac_bench.benchmark.schema import Benchmark
from kfac_bench.benchmark.score_interval import SeedTimes
from kfac_bench.benchmark.sitting import tasks_of
from kfac_bench.errors import UsageError
from kfac_bench.record import score
from kfac_bench.record.events import RunStarted
from kfac_bench.record.packed_runs import PackedRun
from kfac_bench.record.runs import flatten, option, plain
from kfac_bench.report.tables import Table, Value

NEAR = 1.25
"""An optimizer whose r is at most this is near the best one of the task."""


@dataclass(frozen=True)
class ContestResult:
    """The runs of a contest's table, by task and by the optimizer's name in tables."""

    benchmark: Benchmark
    runs: Mapping[str, Mapping[str, Sequence[PackedRun]]]
    baselines: Mapping[str, Sequence[PackedRun]]

    def times(self) -> SeedTimes:
        """Return the seconds to target, comparable between sittings."""
        speed = {task: machine_speed.factors(self.baselines[task]) for task in self.runs}
        return {
            task: {
                name: [machine_speed.comparable_time_s(run, speed[task]) for run in runs]
                for name, runs in row.items()
            }
            for task, row in self.runs.items()
        }


def load(benchmark: Benchmark, store: ResultStore) -> ContestResult:
    """Return the finished runs of the table.

    Raises:
        UsageError: The store has no finished run of the table.
    """
    found = {
        task: sorted(store.runs(task, "table"), key=lambda run: run.seed)
        for task in tasks_of(benchmark)
    }
    runs: dict[str, dict[str, list[PackedRun]]] = {}
    names: set[str] = set()
    for optimizer in benchmark.axes["optimizer"]:
        of_task = {
            task: [r for r in each if r.optimizer == optimizer] for task, each in found.items()
        }
        # All runs on a task may have died before their first event, so every task is asked.
        name = _label(benchmark, optimizer, [r for own in of_task.values() for r in own])
        name = f"{name} ({optimizer})" if name in names else name
        names.add(name)
        for task, own in of_task.items():
            if own:
                runs.setdefault(task, {})[name] = own
    runs = {task: runs[task] for task in found if task in runs}
    if not runs:
        raise UsageError(
            f"no results of {benchmark.title!r}; run kfac-bench run NAME --results FOLDER first"
        )
    return ContestResult(benchmark, runs, {task: store.runs(task, "baseline") for task in runs})


def _label(benchmark: Benchmark, optimizer: str, runs: Sequence[PackedRun]) -> str:
    """Return the name of an optimizer in tables: that of the tuning, else that of its runs."""
    if benchmark.tuning is not None and optimizer in benchmark.tuning.labels:
        return benchmark.tuning.labels[optimizer]
    started = (e for run in runs for e in run.events if isinstance(e, RunStarted))
    labels = (option(event.config, "label") for event in started)
    return plain(next((label for label in labels if label), optimizer))


def begin_mark(name: str) -> str:
    """Return the line of a page after which ``kfac-bench contest NAME --into`` writes."""
    return f"<!-- made by kfac-bench contest {name} --into -->"


END = "<!-- end of what kfac-bench contest made -->"


def tables(result: ContestResult) -> list[Table]:
    """Return the scores, the ratios, the times and the sittings."""
    times = result.times()
    return [
        _scores(result, times),
        performance_profile.table(score_interval.medians(times), "r on each task"),
        _times(result, times),
        _sittings(result),
    ]


def _scores(result: ContestResult, times: SeedTimes) -> Table:
    held_out = [task for task in times if task in result.benchmark.held_out]
    develop = [task for task in times if task not in held_out]
    subsets = {"": [*times]}
    if held_out and develop:
        subsets |= {" develop": develop, " held out": held_out}
    intervals = {n: score_interval.score_intervals(times, tasks) for n, tasks in subsets.items()}
    ratios = performance_profile.ratios(score_interval.medians(times))
    rows: list[list[Value]] = []
    for name in sorted(intervals[""], key=lambda n: (-intervals[""][n].score, n)):
        cells: list[Value] = [name]
        for of_subset in intervals.values():
            own = of_subset.get(name)
            cells.append(_with_interval(own.score, own.low, own.high) if own else "0")
        worse = {task: r for task, r in ratios[name].items() if r > NEAR}
        far = ", ".join(f"{task} {r:.3g}" for task, r in worse.items())
        rows.append([*cells, max(ratios[name].values()), far or "none"])
    columns = ["optimizer", *(f"score{n}" for n in subsets)]
    notes = [
        f"Score: area below the profile for tau in [1, {TAU_MAX:g}], at most 1. Brackets: 95 % "
        "bootstrap interval over seeds, resampled for each task and optimizer",
        f"r: median seconds to target over those of the task's best optimizer; inf if half missed. "
        f"The last column lists the tasks with r above {NEAR:g}",
        *_missing(result),
    ]
    title = f"Scores: {result.benchmark.title}"
    return Table(title, [*columns, "worst r", f"r above {NEAR:g}"], rows, notes)


def _missing(result: ContestResult) -> list[str]:
    """Return notes on what has not run, or not with the same settings."""
    notes = []
    if absent := [task for task in tasks_of(result.benchmark) if task not in result.runs]:
        notes.append(f"Not run yet, and not counted: {', '.join(absent)}")
    notes += performance_profile.not_run(result.runs)
    for task, row in result.runs.items():
        counts = [len(runs) for runs in row.values()]
        few, many = min(counts), max(counts)
        if few < many:
            notes.append(f"{task}: optimizers have between {few} and {many} seeds")
        elif few < (planned := len(result.benchmark.seeds)):
            notes.append(f"{task}: only {few} of {planned} seeds have run")
        for name, runs in row.items():
            if len({_settings(run) for run in runs} - {""}) > 1:
                notes.append(f"{task}, {name}: not all runs have the same settings")
    return notes


def _settings(run: PackedRun) -> str:
    """Return the run's options but the seed as text; "" if the run died before its first event."""
    started = next((e for e in run.events if isinstance(e, RunStarted)), None)
    if started is None:
        return ""
    options = flatten(started.config)
    return repr({name: value for name, value in options.items() if name != "seed"})


def _times(result: ContestResult, times: SeedTimes) -> Table:
    ratios = performance_profile.ratios(score_interval.medians(times))
    rows: list[list[Value]] = []
    for task, row in result.runs.items():
        for name, runs in row.items():
            seconds = times[task][name]
            reached = f"{sum(map(math.isfinite, seconds))} of {len(seconds)}"
            steps = median(score.steps_to_target(run) for run in runs)
            shown = _with_interval(*score.bootstrap_median(seconds))
            rows.append([task, name, reached, steps, shown, ratios[name][task]])
    columns = ("task", "optimizer", "reached", "steps", "seconds", "r")
    note = (
        "Medians over seeds; a missed target counts as inf. Brackets: 95 % bootstrap interval of "
        "the seconds. Seconds of later sittings are scaled to those of the task's first sitting"
    )
    return Table("Time to target", columns, rows, [note])


def _with_interval(value: float, low: float, high: float) -> str:
    return f"{value:.3g} ({low:.3g} to {high:.3g})"


def _sittings(result: ContestResult) -> Table:
    rows: list[list[Value]] = []
    notes = [
        "Baseline: training seconds of the run that each sitting repeats, median and range. Scale: "
        "what the sitting's seconds are multiplied by, the first baseline over its own"
    ]
    for task, row in result.runs.items():
        runs = [run for each in row.values() for run in each]
        counts = Counter(run.sitting for run in runs)
        seconds = machine_speed.seconds_by_sitting(result.baselines[task])
        scale = machine_speed.factors(result.baselines[task])
        for sitting, count in sorted(counts.items()):
            own = seconds.get(sitting)
            spread: list[Value] = [median(own), min(own), max(own)] if own else [None] * 3
            machine = _machine([run for run in runs if run.sitting == sitting])
            rows.append([task, sitting, machine, count, *spread, scale.get(sitting)])
        if len(counts) > 1:
            notes.append(f"{task} took {len(counts)} sittings, so its r rest on the scale, too")
            if bare := sorted(counts.keys() - scale.keys()):
                notes.append(f"{task}: no baseline of {', '.join(bare)} finished: not scaled")
    columns = ("task", "sitting", "machine", "runs", "baseline s", "low", "high", "scale")
    return Table("Sittings", columns, rows, notes)


def _machine(runs: Sequence[PackedRun]) -> str:
    started = (e.environment for r in runs for e in r.events if isinstance(e, RunStarted))
    kinds = set()
    for about in started:
        processor = "cpu" if option(about, "device") in (None, "cpu") else "gpus"
        name = plain(option(about, "hardware", processor))
        kinds.add(f"{name}, torch {plain(option(about, 'versions', 'torch'))}")
    return "; ".join(sorted(kinds))
