"""``kfac-bench tune NAME``: tunes each optimizer with the same budget and writes experiment files.

The method is that of AlgoPerf:

* Each tuning seed is a study. All studies have the same number of trials. The trials are points of
  the study's own scrambled Halton sequence in the optimizer's space.
* The result of a study is the shortest time to target of its trials. The result of an optimizer is
  the median over its studies.
* A trial stops when it has taken as long as the best trial of its study, because it cannot win any
  more. This rule is the same for all optimizers and changes no result.
* The winner of each study is then run on the seeds of the other studies. The best winner becomes
  the experiment file.

Trials that have run are not run again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from scipy.stats import qmc

from kfac_bench.benchmark import forked, performance_profile, schema
from kfac_bench.benchmark.schema import Benchmark, Tuning
from kfac_bench.config import compose
from kfac_bench.errors import UsageError
from kfac_bench.record import score
from kfac_bench.record.events import EVENTS_FILE, Event, RunEnded, RunStarted, read
from kfac_bench.record.text_file import write_text
from kfac_bench.report.tables import Table, Value
from kfac_bench.training.run_directory import directory_name


@dataclass(frozen=True)
class TuningTrial:
    """One point of the space with one seed, and its result; a smaller ``key`` is better."""

    settings: Mapping[str, Any]
    key: tuple[float, float]
    """Training seconds to target (inf if missed), then the gap between the best metric and the
    target."""

    @property
    def time_s(self) -> float:
        """Training seconds to target, inf if missed."""
        return self.key[0]

    def __str__(self) -> str:
        result = "missed" if math.isinf(self.time_s) else f"{self.time_s:.2f} s to target"
        return " ".join(f"{k}={v}" for k, v in self.settings.items() if "." in k) + f": {result}"


@dataclass
class Search:
    """The trials of one experiment, by the seed of their study."""

    name: str
    point: Mapping[str, str]
    studies: dict[int, list[TuningTrial]] = field(default_factory=dict)

    def best(self, seed: int) -> TuningTrial:
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
    benchmark: Benchmark, runs_dir: str, out: Path, say: Callable[[str], None], only: str = ""
) -> None:
    """Tune every point of the benchmark's axes and write one experiment file for each.

    Args:
        benchmark: The benchmark; its tuning section says what is tuned.
        runs_dir: Where run directories go.
        out: Folder of the experiment files.
        say: Prints a line.
        only: Tune only the experiments whose names begin with this text.

    Raises:
        UsageError: The benchmark has no tuning section, no name begins with ``only``, or ``out``
            is not a folder.
    """
    tuning = benchmark.tuning
    if tuning is None:
        raise UsageError(f"{benchmark.title!r} has no tuning section")
    if not out.is_dir():
        raise UsageError(f"--out {out}: no such folder; create it first")
    names = {schema.fill_in(tuning.experiment, p): p for p in schema.points(benchmark)}
    searches = [Search(name, p) for name, p in names.items() if name.startswith(only)]
    if not searches:
        raise UsageError(
            f"--only {only}: no experiment begins with this text; there are {', '.join(names)}"
        )
    _run_studies(tuning, searches, runs_dir, say)
    for search in searches:
        best, times = _final(tuning, search, runs_dir)
        path = out / f"{search.name}.yaml"
        write_text(path, experiment_yaml(tuning, search, best, times), make_folder=True)
        say(f"{path}: {best}, median over seeds {score.bootstrap_median(times)[0]:.2f} s")
    for table in tables(benchmark, searches):
        say(table.markdown())


def _run_studies(
    tuning: Tuning, searches: Sequence[Search], runs_dir: str, say: Callable[[str], None]
) -> None:
    """Run the trials of all experiments in turn, so that a slow hour slows every optimizer."""
    total = len(tuning.seeds) * tuning.trials
    for study, seed in enumerate(tuning.seeds):
        for number in range(tuning.trials):
            for search in searches:
                settings = trial_settings(tuning, search.point["optimizer"], study)[number]
                trials = search.studies.setdefault(seed, [])
                limit_s = min((t.time_s for t in trials), default=math.inf)
                trials.append(_run_trial(tuning, search.point, settings, seed, runs_dir, limit_s))
                done = study * tuning.trials + number + 1
                say(f"[{done}/{total}] {search.name} seed {seed} {trials[-1]}")


def trial_settings(tuning: Tuning, optimizer: str, study: int = 0) -> list[dict[str, Any]]:
    """Return the overrides of every trial. They depend on the space, `trials` and `study`."""
    space = tuning.space[optimizer]
    # An option with a fixed value is no dimension of the sequence.
    ranges = {k: v for k, v in space.items() if isinstance(v, dict)}
    samples = qmc.Halton(max(1, len(ranges)), seed=study).random(tuning.trials)
    return [
        {k: _value(ranges[k], u[list(ranges).index(k)]) if k in ranges else v
         for k, v in space.items()}
        for u in samples
    ]  # fmt: skip


def _value(option: Mapping[str, list[Any]], u: float) -> Any:
    """Return the value of a range at ``u`` in [0, 1)."""
    match dict(option):
        case {"log": [low, high]}:
            # Three digits keep experiment files readable.
            return float(f"{low * (high / low) ** u:.3g}")
        case {"choice": [*choices]}:
            return choices[math.floor(u * len(choices))]
    raise UsageError(f"tuning space: {dict(option)} is neither log: [low, high] nor choice: [...]")


def _run_trial(
    tuning: Tuning,
    point: Mapping[str, str],
    settings: Mapping[str, Any],
    seed: int,
    runs_dir: str,
    limit_s: float = math.inf,
) -> TuningTrial:
    base = [schema.fill_in(text, point) for text in tuning.overrides]
    chosen = [f"{k}={'null' if v is None else v}" for k, v in settings.items()]
    overrides = [*base, *chosen, f"seed={seed}", f"runs_dir={runs_dir}"]
    config = compose.load(overrides)
    # The limit becomes part of the options, and so of the run's name: a trial with another limit
    # is another run.
    if limit_s < (config.trainer.max_train_s or math.inf):
        config.trainer.max_train_s = limit_s
        overrides.append(f"trainer.max_train_s={limit_s}")
    # Without the job's number, because jobs of a cluster share the directory.
    name = directory_name(config, job="")
    path = Path(config.runs_dir) / name
    if not _has_ended(path):
        code, line = forked.train([*overrides, f"run_id={name}"])
        if code == 2:  # The options are wrong, so every other trial would fail too.
            raise UsageError(f"{' '.join(overrides)}: {line}")
    return TuningTrial(settings, _judge(path, config.trainer.target))


def _has_ended(path: Path) -> bool:
    ended = [e for e in _events(path) if isinstance(e, RunEnded)]
    return bool(ended) and ended[-1].status != "interrupted"


def _events(path: Path) -> list[Event]:
    return read(path) if (path / EVENTS_FILE).exists() else []


def _judge(path: Path, target: float | None) -> tuple[float, float]:
    """Return the training seconds to target, and the gap between the best metric and the target."""
    if target is None or not any(isinstance(e, RunStarted) for e in _events(path)):
        return math.inf, math.inf
    run = score.load(path)
    gap = abs(score.best_metric(run) - target)
    return score.time_to_target_s(run), math.inf if math.isnan(gap) else gap


def _final(tuning: Tuning, search: Search, runs_dir: str) -> tuple[TuningTrial, list[float]]:
    """Run each study's winner on the seeds of all studies; return the best and its times by seed.

    The best winner has the smallest median time, or the smallest median gap if times are equal.
    """
    results = []
    for own in tuning.seeds:
        winner = search.best(own)
        on_seeds = [
            winner if seed == own
            else _run_trial(tuning, search.point, winner.settings, seed, runs_dir)
            # A winner that missed its own study's target is not run on other seeds.
            for seed in (tuning.seeds if not math.isinf(winner.time_s) else [own])
        ]  # fmt: skip
        times = [t.time_s for t in on_seeds]
        gaps = [t.key[1] for t in on_seeds]
        key = (score.bootstrap_median(times)[0], score.bootstrap_median(gaps)[0])
        results.append((key, winner, times))
    _, best, times = min(results, key=lambda r: r[0])
    return best, times


def experiment_yaml(
    tuning: Tuning, search: Search, best: TuningTrial, times: Sequence[float]
) -> str:
    """Return the best trial as a file for conf/experiment, with a comment on how it was found."""
    groups = {k: v for k, v in best.settings.items() if "." not in k}
    tree: dict[str, Any] = {}
    for key, value in best.settings.items():
        group, _, option = key.partition(".")
        if option:
            tree.setdefault(group, {})[option] = value
    if label := tuning.labels.get(search.point["optimizer"]):
        tree = {"label": label, **tree}
    parent: str = schema.fill_in(tuning.overrides[0], search.point).removeprefix("experiment=")
    defaults = [
        f"/experiment/{parent}",
        *({f"override /{k}": v} for k, v in groups.items()),
        "_self_",
    ]
    said = ", ".join("missed" if math.isinf(t) else f"{t:.2f} s" for t in times)
    header = (
        f"# Written by kfac-bench tune: the best of {len(tuning.seeds) * tuning.trials} trials, "
        f"{tuning.trials} on each of the seeds\n# {', '.join(map(str, tuning.seeds))}, of which "
        f"{search.reached} reached the target before they were stopped;\n"
        f"# its own times to target on these seeds: {said}.\n"
    )
    # Two dumps, because the defaults list reads best with one line per entry.
    blocks = [
        yaml.safe_dump({"defaults": defaults}, sort_keys=False, default_flow_style=None),
        yaml.safe_dump(tree, sort_keys=False),
    ]
    return "".join(["# @package _global_\n", header, *blocks])


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
        median, low, high = score.bootstrap_median(search.times_s)
        times.setdefault(task, {})[name] = median
        rows.append([task, name, median, low, high, search.reached])
    columns = ("task", "optimizer", "seconds to target", "low", "high", "trials that reached it")
    note = (
        f"Median over {len(tuning.seeds)} studies of {tuning.trials} trials; the result of a study "
        "is its fastest trial. 95 % bootstrap interval. A trial stops when it cannot win any more"
    )
    results = [Table(f"Tuning: {benchmark.title}", columns, rows, [note])]
    if len(times) > 1:
        results.append(performance_profile.table(times, "Performance profiles of the tuning"))
    return results
