"""``kfac-bench tune NAME``: tunes each optimizer with the same budget and writes experiment files.

The method is that of AlgoPerf:

* Each tuning seed is a study. All studies have the same number of trials. The trials are points of
  the study's own scrambled Halton sequence in the optimizer's space. The points are the same for
  all tasks.
* The result of a study is the shortest time to target of its trials. The result of an optimizer is
  the median over its studies.
* A trial stops when it has taken ``patience`` times as long as the best trial of its study in this
  session, because it cannot win any more. This rule is the same for all optimizers and changes no
  result.
* The winner of each study is then run on the seeds of the other studies. The best winner becomes
  the experiment file.

Trials that have run are not run again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from kfac_bench.benchmark import grid, performance_profile, schema
from kfac_bench.benchmark.grid import Cell, TimeIsUp, WorkSession
from kfac_bench.benchmark.schema import Benchmark, BenchmarkProfile, Tuning
from kfac_bench.benchmark.trials import (
    TrialResult,
    TrialRunner,
    overrides_of,
    shown_s,
    take_turns,
    trial_settings,
)
from kfac_bench.config import compose
from kfac_bench.config.command_options import path_word
from kfac_bench.errors import UsageError
from kfac_bench.record import score
from kfac_bench.report.tables import Table, Value
from kfac_bench.training.run_directory import run_id
from kfac_bench.whole_files import write_text


@dataclass
class Search:
    """The trials of one experiment, by the seed of their study."""

    name: str
    point: Mapping[str, str]
    studies: dict[int, list[TrialResult]] = field(default_factory=dict)

    def best(self, seed: int) -> TrialResult:
        """Return the winner of the study with this seed."""
        return min(self.studies[seed], key=lambda t: t.key)

    @property
    def times_s(self) -> list[float]:
        """The result of each study."""
        return [self.best(seed).time_s for seed in self.studies]

    @property
    def reached(self) -> int:
        """The number of trials that met the target before they were stopped."""
        return sum(not math.isinf(t.time_s) for trials in self.studies.values() for t in trials)


def tune(
    benchmark: Benchmark,
    runs_dir: str,
    out: Path,
    say: Callable[[str], None],
    only: str = "",
    session: WorkSession | None = None,
) -> None:
    """Tune every point of the benchmark's axes and write one experiment file for each.

    Args:
        benchmark: The benchmark; its tuning section says what is tuned.
        runs_dir: Where run directories go.
        out: Folder of the experiment files.
        say: Prints a line.
        only: Tune only the experiments whose names begin with this text.
        session: The time limit and the store of finished runs; None: neither.

    Raises:
        UsageError: The benchmark has no tuning section, no name begins with ``only``, or ``out``
            is not a folder.
    """
    tuning = check(benchmark, out)
    searches = _searches(benchmark, tuning, only, say)
    runs = TuningRuns(benchmark, tuning, runs_dir, session or WorkSession())
    for search in searches:
        runs.check(search.point, trial_settings(tuning, search.point["optimizer"])[0])
    try:
        _run_studies(tuning, searches, runs, say)
        for search in searches:
            best, times = _final(tuning, search, runs)
            path = out / f"{search.name}.yaml"
            words = words_of_trials(benchmark, tuning, search.point)
            text = experiment_yaml(tuning, words, search.point, search.reached, best, times)
            write_text(path, text, make_folder=True)
            say(f"{path}: {best}, median over seeds: {shown_s(median(times))}")
    except TimeIsUp:
        total = len(searches) * len(tuning.seeds) * tuning.trials
        left = total - sum(len(trials) for s in searches for trials in s.studies.values())
        say(
            f"time is up: {left} of {total} trials are left, and the winners' runs on the seeds of "
            "other studies; the same command continues"
        )
        return
    for table in tables(benchmark, searches):
        say(table.markdown())


def check(benchmark: Benchmark, out: Path) -> Tuning:
    """Return the tuning section.

    Raises:
        UsageError: There is no tuning section, or ``out`` is not a folder.
    """
    if benchmark.tuning is None or not _can_tune(benchmark):
        known = (name for name in compose.options_of("benchmark") if _can_tune(schema.load(name)))
        raise UsageError(
            f"{benchmark.title!r} has no tuning section for this command; choose one of "
            f"{', '.join(known)}"
        )
    if not out.is_dir():
        raise UsageError(f"--out {out}: no such folder; create it first")
    return benchmark.tuning


def _can_tune(benchmark: Benchmark) -> bool:
    return benchmark.tuning is not None and bool(benchmark.overrides)


def _searches(
    benchmark: Benchmark, tuning: Tuning, only: str, say: Callable[[str], None]
) -> list[Search]:
    points = [*schema.points(benchmark)]
    names = {schema.fill_in(tuning.experiment, p): p for p in points}
    if len(names) < len(points):
        raise UsageError("tuning: experiment: needs the name of each axis in braces")
    chosen = [Search(name, p) for name, p in names.items() if name.startswith(only)]
    if not chosen:
        raise UsageError(
            f"--only {only}: no experiment begins with this text; there are {', '.join(names)}"
        )
    for search in chosen:
        if not schema.may_run(benchmark, search.point):
            say(f"{search.name} is left out: {schema.NOT_FROZEN}")
    return [search for search in chosen if schema.may_run(benchmark, search.point)]


class TuningRuns:
    """The runs of a benchmark's tuning, in one folder.

    Args:
        benchmark: The benchmark, whose tuning section is ``tuning``.
        tuning: Overrides of every trial.
        runs_dir: The folder of runs.
        session: The time limit, the baselines and the store.
    """

    def __init__(
        self, benchmark: Benchmark, tuning: Tuning, runs_dir: str, session: WorkSession
    ) -> None:
        self._benchmark, self._tuning, self._runs_dir = benchmark, tuning, runs_dir
        self._runner = TrialRunner(session, is_strict=True)

    def check(self, point: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        """Raise :class:`UsageError` if the options of a trial are wrong, before any trial runs."""
        compose.load(self._words(point, settings, seed=0))

    def run(
        self,
        point: Mapping[str, str],
        settings: Mapping[str, Any],
        seed: int,
        turn: str,
        limit_s: float | None = None,
        kind: str = "final",
    ) -> TrialResult:
        """Run a trial of a study; see :meth:`TrialRunner.run`.

        ``limit_s`` is its longest training, infinite without a limit yet. None: it is the run of a
        winner on another seed, which has no limit. The store calls it ``kind``.
        """
        words = self._words(point, settings, seed)
        config = compose.load(words)
        # The limit is no part of the name: in one study later trials have smaller limits only, so
        # a trial that was stopped would be stopped again. A run without limit has another name. The
        # job's number is no part of it either, because jobs of a cluster share the directory.
        name = run_id(config, job="") + ("" if limit_s is None else "-trial")
        if limit_s is not None and limit_s < (config.trainer.max_train_s or math.inf):
            words.append(f"trainer.max_train_s={limit_s}")
        cell = Cell(name, tuple(words), 1, point, seed, folder=Path(config.runs_dir) / name)
        return self._runner.run(cell, settings, kind if limit_s is None else "trial", turn)

    def _words(self, point: Mapping[str, str], settings: Mapping[str, Any], seed: int) -> list[str]:
        common = words_of_trials(self._benchmark, self._tuning, point)
        own = [f"seed={seed}", path_word("runs_dir", self._runs_dir)]
        return [*common, *overrides_of(settings), *own]


def words_of_trials(benchmark: Benchmark, tuning: Tuning, point: Mapping[str, str]) -> list[str]:
    """Return the overrides of every trial at this point of the axes.

    Raises:
        UsageError: ``each`` has ``ranks=``: trials run on one rank.
    """
    texts = [*tuning.overrides]
    for axis in [*point, *grid.joined_axes(benchmark, BenchmarkProfile())]:
        value = " ".join(point[each] for each in axis.split(" "))
        texts += grid.options_of_value(benchmark, BenchmarkProfile(), axis, value)
    if ranks := [text for text in texts if text.startswith("ranks=")]:
        raise UsageError(f"{ranks[0]}: trials run on one rank; leave it out to tune")
    return [schema.fill_in(text, point) for text in texts]


def _run_studies(
    tuning: Tuning, searches: Sequence[Search], runs: TuningRuns, say: Callable[[str], None]
) -> None:
    """Run the studies, one after the other. In a study the optimizers take turns."""
    total = len(tuning.seeds) * tuning.trials
    before: int | None = 0  # finished trials ahead of the first new one; None: it has run
    for study, seed in enumerate(tuning.seeds):

        def run_next(search: Search, study: int = study, seed: int = seed) -> bool:
            nonlocal before
            trials = search.studies.setdefault(seed, [])
            if len(trials) == tuning.trials:
                return False
            settings = trial_settings(tuning, search.point["optimizer"], study)[len(trials)]
            done = study * tuning.trials + len(trials) + 1
            limit_s = tuning.patience * min((t.here_s for t in trials), default=math.inf)
            trials.append(runs.run(search.point, settings, seed, f"turn {done}", limit_s))
            if before is not None and not trials[-1].is_new:
                before += 1
                return True
            if before:
                say(f"{before} trials had finished before")
            before = None
            say(f"[{done}/{total}] {search.name} seed {seed} {trials[-1]}")
            return True

        take_turns(searches, run_next)
    if before:
        say(f"all {before} trials had finished before")


def _final(tuning: Tuning, search: Search, runs: TuningRuns) -> tuple[TrialResult, list[float]]:
    """Run each study's winner on the seeds of all studies; return the best and its times by seed.

    The best winner has the smallest median time, or the smallest median gap if times are equal.
    """
    results = []
    for own in tuning.seeds:
        winner = search.best(own)
        on_seeds = [
            winner
            if seed == own
            else runs.run(search.point, winner.settings, seed, f"final {seed}")
            # A winner that missed its own study's target is not run on other seeds.
            for seed in (tuning.seeds if not math.isinf(winner.time_s) else [own])
        ]
        times = [t.time_s for t in on_seeds]
        gaps = [t.key[1] for t in on_seeds]
        key = (median(times), median(gaps))
        results.append((key, winner, times))
    _, best, times = min(results, key=lambda r: r[0])
    return best, times


def tables(benchmark: Benchmark, searches: Sequence[Search]) -> list[Table]:
    """Return the tables of the studies: seconds to target, and the optimizers' profiles."""
    tuning = benchmark.tuning
    assert tuning is not None
    rows: list[list[Value]] = []
    times: dict[str, dict[str, float]] = {}
    for search in searches:
        optimizer = search.point["optimizer"]
        name = tuning.labels.get(optimizer, optimizer)
        task = " ".join(v for k, v in search.point.items() if k != "optimizer")
        middle, low, high = score.median_with_interval(search.times_s)
        times.setdefault(task, {})[name] = middle
        rows.append([task, name, middle, low, high, search.reached])
    columns = ("task", "optimizer", "seconds to target", "low", "high", "trials that reached it")
    note = (
        f"Median over {len(tuning.seeds)} studies of {tuning.trials} trials; the result of a study "
        "is its fastest trial. 95 % interval. A trial stops when it cannot win any more"
    )
    results = [Table(f"Tuning: {benchmark.title}", columns, rows, [note])]
    if len(times) > 1:
        results.append(performance_profile.table(times, "Performance profiles of the tuning"))
    return results


def experiment_yaml(
    tuning: Tuning,
    words: Sequence[str],
    point: Mapping[str, str],
    reached: int,
    best: TrialResult,
    times: Sequence[float],
) -> str:
    """Return the best trial as a file for conf/experiment, with a comment on how it was found.

    ``words`` are those of every trial. ``reached`` of all trials met the target; ``times`` are
    those of the best one by seed.
    """
    parents = [word.removeprefix("experiment=") for word in words if word.startswith("experiment=")]
    # The words of every trial say what was trained, and how long, in addition to the parents.
    pairs = (word.split("=", 1) for word in words if "=" in word)
    own = {k: yaml.safe_load(v) for k, v in pairs if k not in ("experiment", "logger")}
    settings = own | dict(best.settings)
    groups = {k: v for k, v in settings.items() if "." not in k}
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        group, _, option = key.partition(".")
        if option:
            tree.setdefault(group, {})[option] = value
    if label := tuning.labels.get(point["optimizer"]):
        tree = {"label": label, **tree}
    defaults = [
        *(f"/experiment/{parent}" for parent in parents),
        *({f"override /{k}": v} for k, v in groups.items()),
        "_self_",
    ]
    said = ", ".join(map(shown_s, times))
    header = (
        f"# Written by kfac-bench tune: the best of {len(tuning.seeds) * tuning.trials} trials, "
        f"{tuning.trials} on each of the seeds\n# {', '.join(map(str, tuning.seeds))}, of which "
        f"{reached} reached the target before they were stopped;\n"
        f"# its own times to target on these seeds: {said}.\n"
    )
    # Two dumps, because the defaults list reads best with one line per entry.
    blocks = [
        yaml.safe_dump({"defaults": defaults}, sort_keys=False, default_flow_style=None),
        yaml.safe_dump(tree, sort_keys=False),
    ]
    return "".join(["# @package _global_\n", header, *blocks])
