"""``kfac-bench tune NAME``: one equal budget per optimizer, the best trial becomes an experiment.

Trials are points of a scrambled Halton sequence (fixed seed) in the optimizer's space. A trial is
judged by its mean training seconds to target over the tuning seeds; one that misses on a seed is
judged by how near it came, after all that did not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from scipy.stats import qmc

from kfac_bench import bench, score
from kfac_bench.bench import Benchmark, Cell, Tuning
from kfac_bench.errors import UsageError


@dataclass(frozen=True)
class Trial:
    """One point of the space and how it did; smaller ``key`` is better."""

    settings: Mapping[str, Any]
    key: tuple[float, float]

    @property
    def mean_s(self) -> float:
        """Mean training seconds to target, inf if missed on a seed."""
        return self.key[0]

    def __str__(self) -> str:
        found = "missed" if math.isinf(self.mean_s) else f"{self.mean_s:.2f} s to target"
        return " ".join(f"{k}={v}" for k, v in self.settings.items() if "." in k) + f": {found}"


def tune(
    benchmark: Benchmark, runs_dir: str, out: Path, say: Callable[[str], None], only: str = ""
) -> None:
    """Tune every point of the benchmark's axes, and write one experiment file for each.

    ``only`` names the one experiment to write. Raises :class:`UsageError` if the benchmark has no
    tuning section, ``only`` is none of its experiments, or ``out`` is no folder.
    """
    tuning = benchmark.tuning
    if tuning is None:
        raise UsageError(f"{benchmark.title!r} has no tuning section")
    if not out.is_dir():
        raise UsageError(f"--out {out}: no such folder")
    experiments = {tuning.experiment.format(**p): p for p in bench.points(benchmark)}
    if only and only not in experiments:
        raise UsageError(f"--only {only}: choose one of {', '.join(experiments)}")
    chosen = {n: p for n, p in experiments.items() if only in ("", n)}
    trials: dict[str, list[Trial]] = {name: [] for name in chosen}
    for number in range(tuning.trials):  # the outer loop: a slow hour slows every optimizer
        for name, point in chosen.items():
            settings = trial_settings(tuning, point["optimizer"])[number]
            trials[name].append(_run_trial(tuning, point, settings, runs_dir))
            say(f"[{number + 1}/{tuning.trials}] {name} {trials[name][-1]}")
    for name, point in chosen.items():
        best = min(trials[name], key=lambda t: t.key)
        path = out / f"{name}.yaml"
        path.write_text(experiment_yaml(tuning, point, trials[name], best))
        say(f"{path}: best of {tuning.trials} trials, {best.mean_s:.2f} s to target")


def trial_settings(tuning: Tuning, optimizer: str) -> list[dict[str, Any]]:
    """Every trial's overrides; a function of the space and the number of trials alone."""
    space = tuning.space[optimizer]
    ranges = {k: v for k, v in space.items() if isinstance(v, dict)}
    samples = qmc.Halton(max(1, len(ranges)), seed=0).random(tuning.trials)
    return [
        {k: _value(ranges[k], u[list(ranges).index(k)]) if k in ranges else v
         for k, v in space.items()}
        for u in samples
    ]  # fmt: skip


def _value(option: Mapping[str, list[Any]], u: float) -> Any:
    """The value at ``u`` in [0, 1) of a range."""
    match dict(option):
        case {"log": [low, high]}:
            return float(f"{low * (high / low) ** u:.3g}")
        case {"choice": [*choices]}:
            return choices[math.floor(u * len(choices))]
    raise UsageError(f"tuning space: {dict(option)} is neither log: [low, high] nor choice: [...]")


def _run_trial(
    tuning: Tuning, point: Mapping[str, str], settings: Mapping[str, Any], runs_dir: str
) -> Trial:
    base = [text.format(**point) for text in tuning.overrides]
    times, gaps = [], []
    for seed in tuning.seeds:
        chosen = (f"{k}={v}" for k, v in settings.items())
        cell = Cell("trial", (*base, *chosen, f"seed={seed}", f"runs_dir={runs_dir}"))
        bench.run_cell(cell)
        time_s, gap = _judge(cell)
        times.append(time_s)
        gaps.append(gap)
        if math.isinf(time_s):  # missed: the other seeds cannot mend it
            break
    return Trial(settings, (sum(times) / len(times), max(gaps)))


def _judge(cell: Cell) -> tuple[float, float]:
    """Training seconds to target, and the distance of the best figure from it."""
    path, target = cell.path(), cell.config().trainer.target
    if target is None or not (path / "events.jsonl").exists():
        return math.inf, math.inf
    run = score.load(path)
    gap = abs(score.best_metric(run) - target)
    return score.time_to_target_s(run), math.inf if math.isnan(gap) else gap


def experiment_yaml(
    tuning: Tuning, point: Mapping[str, str], trials: list[Trial], best: Trial
) -> str:
    """The best trial as a file for conf/experiment, with how it was found."""
    groups = {k: v for k, v in best.settings.items() if "." not in k}
    tree: dict[str, Any] = {}
    for key, value in best.settings.items():
        group, _, option = key.partition(".")
        if option:
            tree.setdefault(group, {})[option] = value
    parent: str = tuning.overrides[0].format(**point).removeprefix("experiment=")
    hits = sum(not math.isinf(t.mean_s) for t in trials)
    seeds = ", ".join(map(str, tuning.seeds))
    defaults = [parent, *({f"override /{k}": v} for k, v in groups.items()), "_self_"]
    header = (
        f"# Written by kfac-bench tune: best of {len(trials)} trials on seeds {seeds}, of which "
        f"{hits} reached\n# the target; its mean time to target was {best.mean_s:.2f} s.\n"
    )
    # Dumped apart: the defaults list reads best in one line an entry, options as a block.
    blocks = [
        yaml.safe_dump({"defaults": defaults}, sort_keys=False, default_flow_style=None),
        yaml.safe_dump(tree, sort_keys=False),
    ]
    return "".join(["# @package _global_\n", header, *blocks])
