"""The tables of a contest of optimizers, from packed results alone.

Nothing is composed or trained here, so the tables can be made on any machine, at any time.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.contest import definitions
from benchmarks.contest.interpolated import reached
from benchmarks.contest.packed_runs import PackedRun
from benchmarks.contest.result_store import ResultStore
from benchmarks.contest.sitting import factors, seconds_by_sitting, tasks_of
from kfac_bench.benchmark import performance_profile
from kfac_bench.benchmark.performance_profile import TAU_MAX, Times
from kfac_bench.benchmark.schema import Benchmark
from kfac_bench.errors import UsageError
from kfac_bench.record import score
from kfac_bench.record.events import RunStarted
from kfac_bench.record.runs import option, plain
from kfac_bench.record.score import CONFIDENCE
from kfac_bench.report.tables import Table, Value

RESAMPLES = 2_000

StudyTimes = Mapping[str, Mapping[str, Sequence[float]]]
"""Task to optimizer to the time of each study; a miss is infinite."""


@dataclass(frozen=True)
class ScoreInterval:
    """A profile score, and the ends of its 95 % interval."""

    score: float
    low: float
    high: float


def medians(times: StudyTimes) -> dict[str, dict[str, float]]:
    """Return the median time of each optimizer on each task."""
    return {
        task: {name: float(np.median(values)) for name, values in row.items()}
        for task, row in times.items()
    }


def score_intervals(times: StudyTimes) -> dict[str, ScoreInterval]:
    """Return the score of each optimizer, with its interval.

    An optimizer without runs on a task has missed the task.
    """
    random = np.random.default_rng(0)
    # Of each optimizer the gains of all tasks: 1 for r = 1, and 0 for r of 4 or more.
    gains: dict[str, list[np.ndarray]] = {name: [] for row in times.values() for name in row}
    for row in times.values():
        resampled = {name: _medians(row.get(name, [math.inf]), random) for name in gains}
        best = np.min(list(resampled.values()), axis=0)
        for name, values in resampled.items():
            gains[name].append(_gain(values, best))
    exact = performance_profile.scores(medians(times))
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
    trials: Times
    """The seconds by AlgoPerf's definition. All other times are interpolated."""

    def times(self) -> StudyTimes:
        """Return the seconds to target, comparable between sittings."""
        speed = {task: factors(self.baselines[task]) for task in self.runs}
        return {
            task: {
                name: [reached(run).seconds * speed[task].get(run.sitting, 1.0) for run in runs]
                for name, runs in row.items()
            }
            for task, row in self.runs.items()
        }


def load(benchmark: Benchmark, store: ResultStore) -> ContestResult:
    """Return the finished runs of the table, one of each study.

    Raises:
        UsageError: The store has no finished run of the table.
    """
    found = {
        task: sorted(store.runs(task, "table"), key=lambda run: run.seed)
        for task in tasks_of(benchmark)
    }
    runs: dict[str, dict[str, list[PackedRun]]] = {}
    names: dict[str, str] = {}
    labels = benchmark.tuning.labels if benchmark.tuning is not None else {}
    for optimizer in benchmark.axes["optimizer"]:
        name = labels.get(optimizer, optimizer)
        names[optimizer] = name = f"{name} ({optimizer})" if name in names.values() else name
        for task, each in found.items():
            if own := [run for run in each if run.optimizer == optimizer]:
                runs.setdefault(task, {})[name] = own
    runs = {task: runs[task] for task in found if task in runs}
    if not runs:
        raise UsageError(
            f"no results of {benchmark.title!r}; run study NAME --results FOLDER first"
        )
    baselines = {task: store.runs(task, "baseline") for task in runs}
    return ContestResult(benchmark, runs, baselines, _best_trials(store, baselines, names))


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


def begin_mark(name: str) -> str:
    """Return the line of a page after which ``tables NAME --into`` writes."""
    return f"<!-- made by python -m benchmarks.contest tables {name} --into -->"


END = "<!-- end of what python -m benchmarks.contest tables made -->"


def tables(result: ContestResult) -> list[Table]:
    """Return the scores, the ratios, the times and the sittings."""
    times = result.times()
    return [
        _scores(result, times),
        _by_definition(result, times),
        performance_profile.table(medians(times), "r on each task"),
        _times(result, times),
        _sittings(result),
    ]


def _by_definition(result: ContestResult, times: StudyTimes) -> Table:
    steps = {
        task: {name: median(reached(run).steps for run in runs) for name, runs in row.items()}
        for task, row in result.runs.items()
    }
    return definitions.table(medians(times), steps, result.trials)


def _scores(result: ContestResult, times: StudyTimes) -> Table:
    ratios = performance_profile.ratios(medians(times))
    rows: list[list[Value]] = []
    for name, own in sorted(score_intervals(times).items(), key=lambda i: (-i[1].score, i[0])):
        worse = {task: r for task, r in ratios[name].items() if r > NEAR}
        far = ", ".join(f"{task} {r:.3g}" for task, r in worse.items())
        shown = _with_interval(own.score, own.low, own.high)
        rows.append([name, shown, max(ratios[name].values()), far or "none"])
    columns = ["optimizer", "score", "worst r", f"r above {NEAR:g}"]
    notes = [
        f"Score: area below the profile for tau in [1, {TAU_MAX:g}], at most 1. Brackets: 95 % "
        "bootstrap interval over studies, resampled for each task and optimizer",
        f"r: median seconds to target over those of the task's best optimizer; inf if half missed. "
        f"The last column lists the tasks with r above {NEAR:g}",
        *missing(result),
    ]
    title = f"Scores: {result.benchmark.title}"
    return Table(title, columns, rows, notes)


def missing(result: ContestResult) -> list[str]:
    """Return notes on what has not run."""
    notes = []
    if absent := [task for task in tasks_of(result.benchmark) if task not in result.runs]:
        notes.append(f"Not run yet, and not counted: {', '.join(absent)}")
    notes += performance_profile.not_run(result.runs)
    for task, row in result.runs.items():
        counts = [len(runs) for runs in row.values()]
        few, many = min(counts), max(counts)
        if few < many:
            notes.append(f"{task}: optimizers have between {few} and {many} studies")
        elif few < (planned := len(result.benchmark.seeds)):
            notes.append(f"{task}: only {few} of {planned} studies have run")
    return notes


def _times(result: ContestResult, times: StudyTimes) -> Table:
    ratios = performance_profile.ratios(medians(times))
    rows: list[list[Value]] = []
    for task, row in result.runs.items():
        for name, runs in row.items():
            seconds = times[task][name]
            met = f"{sum(map(math.isfinite, seconds))} of {len(seconds)}"
            steps = median(reached(run).steps for run in runs)
            shown = _with_interval(*score.median_with_interval(seconds))
            rows.append([task, name, met, steps, shown, ratios[name][task]])
    columns = ("task", "optimizer", "reached", "steps", "seconds", "r")
    note = (
        "Medians over studies; a missed target counts as inf. Brackets: the range of the studies. "
        "The range of three holds the true median with 75 %, that of five with 94 %. Seconds of "
        "later sittings are scaled to those of the task's first sitting"
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
