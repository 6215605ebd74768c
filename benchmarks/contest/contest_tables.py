"""The tables of a contest of optimizers, from packed results alone.

Nothing is composed or trained here, so the tables can be made on any machine, at any time.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.contest import definitions
from benchmarks.contest.interpolated import reached
from benchmarks.contest.packed_runs import PackedRun
from benchmarks.contest.result_store import ResultStore
from benchmarks.contest.sitting import comparable_time_s, factors, seconds_by_sitting, tasks_of
from kfac_bench.benchmark import performance_profile
from kfac_bench.benchmark.performance_profile import TAU_MAX, Times
from kfac_bench.benchmark.schema import Benchmark
from kfac_bench.errors import UsageError
from kfac_bench.record import score
from kfac_bench.record.events import RunStarted
from kfac_bench.record.runs import flatten, option, plain
from kfac_bench.record.score import CONFIDENCE
from kfac_bench.report.tables import Table, Value

RESAMPLES = 2_000

SeedTimes = Mapping[str, Mapping[str, Sequence[float]]]
"""Task to optimizer to the times of its seeds; a miss is infinite."""


@dataclass(frozen=True)
class ScoreInterval:
    """A profile score, and the ends of its 95 % interval."""

    score: float
    low: float
    high: float


def medians(times: SeedTimes) -> dict[str, dict[str, float]]:
    """Return the median time of each optimizer on each task."""
    return {
        task: {name: float(np.median(values)) for name, values in row.items()}
        for task, row in times.items()
    }


def score_intervals(times: SeedTimes, tasks: Collection[str]) -> dict[str, ScoreInterval]:
    """Return the score of each optimizer over these tasks, with its interval.

    An optimizer without runs on a task has missed the task.
    """
    chosen = {task: row for task, row in times.items() if task in tasks}
    if not chosen:
        return {}
    random = np.random.default_rng(0)
    # Of each optimizer the gains of all tasks: 1 for r = 1, and 0 for r of 4 or more.
    gains: dict[str, list[np.ndarray]] = {name: [] for row in chosen.values() for name in row}
    for row in chosen.values():
        resampled = {name: _medians(row.get(name, [math.inf]), random) for name in gains}
        best = np.min(list(resampled.values()), axis=0)
        for name, values in resampled.items():
            gains[name].append(_gain(values, best))
    exact = performance_profile.scores(medians(chosen))
    tail = (1 - CONFIDENCE) / 2
    found = {}
    for name, of_tasks in gains.items():
        scores = np.sort(np.mean(of_tasks, axis=0))
        low, high = (float(scores[round(share * (RESAMPLES - 1))]) for share in (tail, 1 - tail))
        found[name] = ScoreInterval(exact[name], low, high)
    return found


def _medians(values: Sequence[float], random: np.random.Generator) -> np.ndarray:
    """Return the median of each resample of the values."""
    draws = random.integers(len(values), size=(RESAMPLES, len(values)))
    return np.asarray(np.median(np.array(values, dtype=np.float64)[draws], axis=1))


def _gain(times: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Return max(0, 4 - r) / 3; 0 for a miss, also on a task that nobody solved."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(times == best, 1.0, times / best)
    ratio = np.where(np.isinf(times) | np.isnan(ratio), math.inf, ratio)
    return np.asarray(np.maximum(0.0, TAU_MAX - ratio) / (TAU_MAX - 1))


NEAR = 1.25
"""An optimizer whose r is at most this is near the best one of the task."""


@dataclass(frozen=True)
class ContestResult:
    """The runs of a contest's table, by task and by the optimizer's name in tables."""

    benchmark: Benchmark
    runs: Mapping[str, Mapping[str, Sequence[PackedRun]]]
    baselines: Mapping[str, Sequence[PackedRun]]
    trials: Times | None = None
    """The seconds by AlgoPerf's definition, if the contest has studies. All other times are then
    interpolated."""

    def times(self) -> SeedTimes:
        """Return the seconds to target, comparable between sittings."""
        speed = {task: factors(self.baselines[task]) for task in self.runs}
        return {
            task: {
                name: [self._seconds(run, speed[task]) for run in runs]
                for name, runs in row.items()
            }
            for task, row in self.runs.items()
        }

    def _seconds(self, run: PackedRun, speed: Mapping[str, float]) -> float:
        if self.trials is None:
            return comparable_time_s(run, speed)
        return reached(run).seconds * speed.get(run.sitting, 1.0)

    def steps(self, run: PackedRun) -> float:
        """Return the steps to the target."""
        return score.steps_to_target(run) if self.trials is None else reached(run).steps


def load(benchmark: Benchmark, store: ResultStore, *, has_studies: bool = False) -> ContestResult:
    """Return the finished runs of the table; a contest with studies has one run of each study.

    Raises:
        UsageError: The store has no finished run of the table.
    """
    found = {
        task: sorted(store.runs(task, "table"), key=lambda run: run.seed)
        for task in tasks_of(benchmark)
    }
    runs: dict[str, dict[str, list[PackedRun]]] = {}
    names: dict[str, str] = {}
    for optimizer in benchmark.axes["optimizer"]:
        of_task = {
            task: [r for r in each if r.optimizer == optimizer] for task, each in found.items()
        }
        # All runs on a task may have died before their first event, so every task is asked.
        name = _label(benchmark, optimizer, [r for own in of_task.values() for r in own])
        names[optimizer] = name = f"{name} ({optimizer})" if name in names.values() else name
        for task, own in of_task.items():
            if own:
                runs.setdefault(task, {})[name] = own
    runs = {task: runs[task] for task in found if task in runs}
    if not runs:
        raise UsageError(
            f"no results of {benchmark.title!r}; run kfac-bench run NAME --results FOLDER first"
        )
    baselines = {task: store.runs(task, "baseline") for task in runs}
    trials = _best_trials(store, baselines, names) if has_studies else None
    return ContestResult(benchmark, runs, baselines, trials)


def _best_trials(
    store: ResultStore, baselines: Mapping[str, Sequence[PackedRun]], names: Mapping[str, str]
) -> Times:
    """Return the seconds of :func:`.definitions.best_trials` by the optimizers' names."""
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for task, own in baselines.items():
        speed = factors(own)
        for run in store.runs(task, "trial"):
            if run.optimizer not in names:
                continue  # the contest has it no more
            of_optimizer = found.setdefault(task, {}).setdefault(names[run.optimizer], {})
            seconds = reached(run).seconds * speed.get(run.sitting, 1.0)
            of_optimizer.setdefault(run.seed, []).append(seconds)
    return definitions.best_trials(found)


def _label(benchmark: Benchmark, optimizer: str, runs: Sequence[PackedRun]) -> str:
    """Return the name of an optimizer in tables: that of the tuning, else that of its runs."""
    if benchmark.tuning is not None and optimizer in benchmark.tuning.labels:
        return benchmark.tuning.labels[optimizer]
    started = (e for run in runs for e in run.events if isinstance(e, RunStarted))
    labels = (option(event.config, "label") for event in started)
    return plain(next((label for label in labels if label), optimizer))


def begin_mark(name: str) -> str:
    """Return the line of a page after which ``tables NAME --into`` writes."""
    return f"<!-- made by python -m benchmarks.contest tables {name} --into -->"


END = "<!-- end of what python -m benchmarks.contest tables made -->"


def tables(result: ContestResult) -> list[Table]:
    """Return the scores, the ratios, the times and the sittings."""
    times = result.times()
    by_definition = [] if result.trials is None else [_by_definition(result, times)]
    return [
        _scores(result, times),
        *by_definition,
        performance_profile.table(medians(times), "r on each task"),
        _times(result, times),
        _sittings(result),
    ]


def _by_definition(result: ContestResult, times: SeedTimes) -> Table:
    steps = {
        task: {name: median(map(result.steps, runs)) for name, runs in row.items()}
        for task, row in result.runs.items()
    }
    assert result.trials is not None
    return definitions.table(medians(times), steps, result.trials)


def _scores(result: ContestResult, times: SeedTimes) -> Table:
    held_out = [task for task in times if task in result.benchmark.held_out]
    others = [task for task in times if task not in held_out]
    subsets = {"": [*times]}
    if held_out and others:
        subsets |= {" other tasks": others, " held out": held_out}
    intervals = {n: score_intervals(times, tasks) for n, tasks in subsets.items()}
    ratios = performance_profile.ratios(medians(times))
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
        f"bootstrap interval over {_of(result)}, resampled for each task and optimizer",
        f"r: median seconds to target over those of the task's best optimizer; inf if half missed. "
        f"The last column lists the tasks with r above {NEAR:g}",
        *_missing(result),
    ]
    title = f"Scores: {result.benchmark.title}"
    return Table(title, [*columns, "worst r", f"r above {NEAR:g}"], rows, notes)


def _of(result: ContestResult) -> str:
    """Return what a median is over. A study includes its own tuning."""
    return "seeds" if result.trials is None else "studies"


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
            notes.append(f"{task}: optimizers have between {few} and {many} {_of(result)}")
        elif few < (planned := len(result.benchmark.seeds)):
            notes.append(f"{task}: only {few} of {planned} {_of(result)} have run")
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
    ratios = performance_profile.ratios(medians(times))
    rows: list[list[Value]] = []
    for task, row in result.runs.items():
        for name, runs in row.items():
            seconds = times[task][name]
            reached = f"{sum(map(math.isfinite, seconds))} of {len(seconds)}"
            steps = median(map(result.steps, runs))
            shown = _with_interval(*score.median_with_interval(seconds))
            rows.append([task, name, reached, steps, shown, ratios[name][task]])
    columns = ("task", "optimizer", "reached", "steps", "seconds", "r")
    note = (
        f"Medians over {_of(result)}; a missed target counts as inf. Brackets: 95 % "
        "interval of the seconds. Seconds of later sittings are scaled to those of the task's "
        "first sitting"
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
        seconds = seconds_by_sitting(result.baselines[task])
        scale = factors(result.baselines[task])
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
