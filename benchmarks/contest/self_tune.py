"""``self-tune NAME``: one literal setting of each optimizer for all tasks.

The candidates are the settings that ``tune`` has tried: each study tried the same
settings on all tasks. Tasks that are held out do not count.

* The ratio of a setting on a task is its seconds divided by the optimizer's own shortest time on
  the task. It is at most 4, where the profile's score is 0. A miss counts as 4. So rivals have no
  influence.
* The winner of a study has the smallest geometric mean of its ratios over the tasks.
* The studies' winners are run on the seeds of all studies, without a limit. The winner with the
  smallest geometric mean of the ratios of its median times becomes the optimizer's one setting.

The result is a benchmark file: ``run NAME_self_tuned`` makes the second table.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from benchmarks.contest.result_store import ResultStore
from benchmarks.contest.sitting import Sitting, comparable_time_s, factors, tasks_of
from kfac_bench.benchmark.grid import TimeIsUp, WorkSession
from kfac_bench.benchmark.performance_profile import TAU_MAX
from kfac_bench.benchmark.schema import Benchmark, Tuning
from kfac_bench.benchmark.trials import overrides_of, shown_s, trial_settings
from kfac_bench.benchmark.tune import TuningRuns, check
from kfac_bench.errors import UsageError
from kfac_bench.whole_files import write_text

Settings = Mapping[str, Any]

SUFFIX = "_self_tuned"


def self_tune(
    name: str,
    benchmark: Benchmark,
    runs_dir: str,
    out: Path,
    say: Callable[[str], None],
    session: WorkSession,
) -> bool:
    """Choose the setting of each optimizer and write ``OUT/NAME_self_tuned.yaml``.

    Returns:
        Whether the file is written; otherwise the time of the sitting is up.

    Raises:
        UsageError: The benchmark has no tuning section, or only tasks that are held out. Trials
            are missing, or ``out`` is not a folder.
    """
    tuning = check(benchmark, out)
    if not isinstance(session, Sitting):
        raise UsageError("self-tune reads the trials of tune; name them by --results")
    store = session.store
    tasks = [task for task in tasks_of(benchmark) if task not in benchmark.held_out]
    if not tasks:
        raise UsageError(f"{name}: every task is held out, so no task can choose a setting")
    runs = TuningRuns(benchmark, tuning, runs_dir, session)
    optimizers = benchmark.axes["optimizer"]
    found = {o: Candidates(tuning, o, tasks, store) for o in optimizers}
    chosen: dict[str, Settings] = {}
    try:
        for optimizer, candidates in found.items():
            chosen[optimizer], mean = candidates.choose(runs, say)
            shown = " ".join(overrides_of(chosen[optimizer]))
            say(f"{optimizer}: {shown}: mean ratio {mean:.2f} over {len(tasks)} tasks")
    except TimeIsUp:
        left = len(optimizers) - len(chosen)
        say(
            f"time is up: {left} of {len(optimizers)} optimizers are left; "
            "the same command continues"
        )
        return False
    path = out / f"{name}{SUFFIX}.yaml"
    write_text(path, benchmark_yaml(name, benchmark, tuning, chosen))
    say(f"benchmark: {path}")
    return True


def mean_ratio(times_s: Mapping[str, float], best_s: Mapping[str, float]) -> float:
    """Return the geometric mean over tasks of time over best time, where a ratio is at most 4."""
    return math.exp(fmean(math.log(_ratio(times_s[task], best_s[task])) for task in best_s))


def _ratio(time_s: float, best_s: float) -> float:
    if math.isinf(time_s) or not best_s > 0:
        return TAU_MAX
    return min(TAU_MAX, max(1.0, time_s / best_s))


class Candidates:
    """The settings of one optimizer that were tried, and their seconds by study and task.

    Raises:
        UsageError: A trial is missing.
    """

    def __init__(
        self, tuning: Tuning, optimizer: str, tasks: Sequence[str], store: ResultStore
    ) -> None:
        self._tuning, self._optimizer = tuning, optimizer
        self.studies: dict[int, list[tuple[Settings, dict[str, float]]]] = {}
        tried = {task: _times_s(store, task, optimizer) for task in tasks}
        for study, seed in enumerate(tuning.seeds):
            of_study = self.studies.setdefault(seed, [])
            for settings in trial_settings(tuning, optimizer, study):
                key = seed, repr(sorted(settings.items()))
                for task in tasks:
                    if key not in tried[task]:
                        raise UsageError(
                            f"{optimizer} on {task}: a trial of seed {seed} is missing in the "
                            "results; run tune with the same --results first"
                        )
                of_study.append((settings, {task: tried[task][key] for task in tasks}))
        every = [times for of_study in self.studies.values() for _, times in of_study]
        self.best_s = {task: min(times[task] for times in every) for task in tasks}

    def winner(self, seed: int) -> tuple[Settings, dict[str, float]]:
        """Return the winner of the study with this seed, and its seconds by task."""
        return min(self.studies[seed], key=lambda each: mean_ratio(each[1], self.best_s))

    def choose(self, runs: TuningRuns, say: Callable[[str], None]) -> tuple[Settings, float]:
        """Run the winners on the seeds of all studies; return the best one and its mean ratio.

        Args:
            runs: Runs trials, unless they have run.
            say: Prints a line for each winner and task.

        Raises:
            TimeIsUp: The time limit of the sitting has passed.
        """
        results = []
        for number, own in enumerate(self._tuning.seeds, start=1):
            settings, on_own = self.winner(own)
            study = f"study {number} of {len(self._tuning.seeds)}"
            medians = {}
            for task in self.best_s:
                point = {"task": task, "optimizer": self._optimizer}
                times = [
                    # A trial that was stopped says only that it was slower than the best.
                    on_own[task] if seed == own and math.isfinite(on_own[task])
                    else runs.run(point, settings, seed, f"final {seed}").time_s
                    for seed in self._tuning.seeds
                ]  # fmt: skip
                medians[task] = median(times)
                say(f"{self._optimizer}, {study}, {task}: median {shown_s(medians[task])}")
            results.append((mean_ratio(medians, self.best_s), settings))
        mean, settings = min(results, key=lambda each: each[0])
        return settings, mean


def _times_s(store: ResultStore, task: str, optimizer: str) -> dict[tuple[int, str], float]:
    """Return comparable seconds of the optimizer's trials on the task, by seed and settings."""
    speed = factors(store.runs(task, "baseline"))
    return {
        (run.seed, repr(sorted(run.settings.items()))): comparable_time_s(run, speed)
        for run in store.runs(task, "trial")
        if run.optimizer == optimizer
    }


def benchmark_yaml(
    name: str, benchmark: Benchmark, tuning: Tuning, chosen: Mapping[str, Settings]
) -> str:
    """Return the benchmark of the second table as YAML, with a comment on how it was made."""
    parent = tuning.overrides
    optimizers = {
        optimizer: [*overrides_of(settings), f"label='{tuning.labels.get(optimizer, optimizer)}'"]
        for optimizer, settings in chosen.items()
    }
    tree: dict[str, Any] = {
        "title": f"{benchmark.title}: one literal setting of each optimizer for all tasks",
        "axes": {"task": benchmark.axes["task"], "optimizer": [*chosen]},
        "overrides": list(parent),
        "each": {**benchmark.each, "optimizer": optimizers},
        "seeds": list(benchmark.seeds),
        "held_out": list(benchmark.held_out),
        "frozen": dict(benchmark.frozen),
        "baseline": list(benchmark.baseline),
    }
    comment = (
        f"# Written by python -m benchmarks.contest self-tune {name}. Of all settings that the\n"
        "# studies tried, each optimizer has the one that serves best on the tasks that are not\n"
        "# held out.\n"
    )
    return comment + yaml.safe_dump(tree, sort_keys=False, width=100)
