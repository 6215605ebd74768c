"""Measure K-FAC's defaults on the seven develop tasks: docs/lab/defaults.md.

    python benchmarks/defaults.py [--tasks NAME,...] [--optimizers sgd,adamw] [--seeds 0,1,2]
        [--kfac JSON] [--turns] [--all-rates]

First each optimizer runs alone at three usual rates. Then it runs with ``KFAC(model, optimizer)``,
without any keyword, at the rate that was best for the optimizer alone, or at all three.
Finished runs are kept in ``benchmarks/results/defaults.jsonl`` and not run again. ``--kfac`` adds
runs with other options.

Times of separate runs are not comparable if other programs run. ``--turns`` measures the seconds
again: it trains the first seed of each row once more, alone and with K-FAC in turns.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

# A file that is started directly does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.develop_tasks import TASKS, DevelopTask
from kfac_bench.core import KFAC
from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import Data
from kfac_bench.data.base.order import Shard, steps_per_epoch
from kfac_bench.tasks.task import SummedTask
from kfac_bench.training.environment import describe

RATES = {"sgd": (0.003, 0.03, 0.3), "adamw": (0.0003, 0.001, 0.003)}
"""Three usual rates of each optimizer, the same for all tasks."""
RESULTS = Path(__file__).parent / "results" / "defaults.jsonl"


@dataclass(frozen=True)
class Run:
    """A run of one task: the optimizer, its rate, the seed and the options of K-FAC."""

    task: str
    optimizer: str
    rate: float
    seed: int
    kfac: str
    """``none``, or the options of :class:`KFAC` as JSON, defaults included."""


@dataclass(frozen=True)
class Curve:
    """The metric of a run on the held-back examples, which were not trained on."""

    steps: list[int]
    seconds: list[float]
    """CPU seconds of training, without evaluation."""
    metric: list[float]
    """Infinite once it was not a number."""

    def at(self, seconds: float) -> float:
        """Return the metric after that time, linear between evaluations."""
        points = list(zip(self.seconds, self.metric, strict=True))
        for (t0, m0), (t1, m1) in pairwise(points):
            if seconds <= t1:
                return m0 + (m1 - m0) * (max(seconds, t0) - t0) / (t1 - t0)
        return points[-1][1]


def kfac_options(given: Mapping[str, Any]) -> str:
    """Return the options of a KFAC as JSON: the defaults of today, and what is ``given``."""
    parameters = inspect.signature(KFAC).parameters.values()
    defaults = {
        p.name: p.default
        for p in parameters
        if isinstance(p.default, bool | int | float | str | None) and p.name not in given
    }
    return json.dumps(defaults | dict(given), sort_keys=True)


def train(run: Run) -> Curve:
    """Train one run and return its curve."""
    steps, seconds, metric = zip(*_evaluations(run), strict=True)
    return Curve([*steps], [*seconds], [*metric])


def time_in_turns(alone: Run, kfac: Run) -> tuple[list[float], list[float]]:
    """Train two runs in turns, each up to its next evaluation; return the seconds of both."""
    pairs = zip(_evaluations(alone), _evaluations(kfac), strict=True)
    seconds = [(first[1], second[1]) for first, second in pairs]
    return [first for first, _ in seconds], [second for _, second in seconds]


def _evaluations(run: Run) -> Iterator[tuple[int, float, float]]:
    """Train one run; yield steps, seconds and metric at each evaluation."""
    task, data = TASKS[run.task], _data(run.task)
    torch.manual_seed(run.seed)
    model, objective = task.model(), task.objective()
    optimizer = _optimizer(run, model)
    kfac = None if run.kfac == "none" else KFAC(model, optimizer, **json.loads(run.kfac))
    yield 0, 0.0, _evaluate(model, data, objective, task)
    seconds, batches = 0.0, _batches(data, task, run.seed)
    for step in range(1, task.steps + 1):
        batch = data.prepare(next(batches))
        start = time.process_time()
        optimizer.zero_grad()
        objective.forward(model, batch)[0].backward()  # type: ignore[attr-defined]
        if kfac is not None:
            kfac.step()
        optimizer.step()
        seconds += time.process_time() - start
        if step * task.evaluations % task.steps == 0:
            metric = _evaluate(model, data, objective, task)
            yield step, seconds, metric if math.isfinite(metric) else math.inf


@cache
def _data(name: str) -> Data:
    return TASKS[name].data()


def _optimizer(run: Run, model: nn.Module) -> Optimizer:
    if run.optimizer == "sgd":
        return SGD(model.parameters(), lr=run.rate, momentum=0.9)
    return AdamW(model.parameters(), lr=run.rate)


def _batches(data: Data, task: DevelopTask, seed: int) -> Iterator[Batch]:
    # All runs of a seed see the same batches in the same order.
    epochs = -(-task.steps // steps_per_epoch(data.train_size, task.batch_size))
    for epoch in range(epochs):
        yield from data.train(task.batch_size, seed, epoch, 0, Shard(0, 1))


def _evaluate(model: nn.Module, data: Data, objective: SummedTask, task: DevelopTask) -> float:
    model.eval()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    if task.batch_statistics:
        for norm in norms:
            norm.train()
            norm.momentum = 0.0  # the running averages stay
    batches = ([x[:: task.stride] for x in batch] for batch in data.evaluate(512, Shard(0, 1)))
    parts = [objective.totals(model, data.prepare(tuple(batch))) for batch in batches]
    model.train()
    for norm in norms:
        norm.momentum = 0.1
    return objective.metrics(torch.stack(parts).sum(0))[task.metric]


def _code() -> dict[str, Any]:
    """Return the commit and the number of threads that a run belongs to."""
    return {"commit": describe()["git_commit"], "threads": torch.get_num_threads()}


class Results:
    """Finished runs, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        read = [json.loads(line) for line in lines]
        self._curves = {Run(**x["run"]): Curve(**x["curve"]) for x in read}

    def find(self, run: Run) -> Curve | None:
        """Return the curve of a run, if the run has finished."""
        return self._curves.get(run)

    def get(self, run: Run) -> Curve:
        """Return the curve of a run, which is trained if there is none yet."""
        if run not in self._curves:
            self._curves[run] = curve = train(run)
            with self._path.open("a") as file:
                file.write(
                    json.dumps({"run": asdict(run), "curve": asdict(curve), **_code()}) + "\n"
                )
            print(f"{run}: {curve.metric[-1]:.4g}, {curve.seconds[-1]:.1f} s", file=sys.stderr)
        return self._curves[run]


@dataclass(frozen=True)
class Comparison:
    """One row of the table: an optimizer on a task, alone and with K-FAC, over the seeds."""

    task: str
    optimizer: str
    rate: float
    alone: list[Curve]
    kfac: list[Curve]

    @property
    def gain(self) -> float:
        """The difference of the mean metrics after equal steps: positive if K-FAC's is lower."""
        return _mean(self.alone) - _mean(self.kfac)

    @property
    def range(self) -> float:
        """Highest minus lowest metric of the optimizer alone, over the seeds."""
        return max(_final(self.alone)) - min(_final(self.alone))

    @property
    def verdict(self) -> str:
        """Return ``better`` or ``worse`` if the means differ by more than the seeds' range."""
        if math.isnan(self.gain):
            return "both diverge"
        if abs(self.gain) <= self.range:
            return "better, within the range" if self.gain > 0 else "worse, within the range"
        return "**better**" if self.gain > 0 else "**WORSE**"

    def equal_seconds(self) -> list[float]:
        """Return K-FAC's metric of each seed after the seconds that the optimizer alone needed."""
        seconds = statistics.median(curve.seconds[-1] for curve in self.alone)
        return [curve.at(seconds) for curve in self.kfac]

    def row(self) -> str:
        """Return the row in Markdown."""
        time_ratio = statistics.median(c.seconds[-1] for c in self.kfac) / statistics.median(
            c.seconds[-1] for c in self.alone
        )
        cells = (
            self.task,
            f"{self.optimizer} {self.rate:g}",
            _with_range(_final(self.alone)),
            _with_range(_final(self.kfac)),
            self.verdict,
            _with_range(self.equal_seconds()),
            f"{time_ratio:.2f}",
        )
        return "| " + " | ".join(cells) + " |"


HEADER = """\
| task (metric on held-back data) | optimizer and rate | alone | with K-FAC, equal steps | \
verdict | with K-FAC, equal seconds | time per step |
| --- | --- | ---: | ---: | --- | ---: | ---: |"""


def compare(
    results: Results,
    task: str,
    optimizer: str,
    seeds: Sequence[int],
    kfac: str,
    *,
    turns: bool,
    rate: float | None = None,
) -> Comparison:
    """Run an optimizer alone at all rates, and with K-FAC at one rate: by default the best one.

    ``turns`` replaces the seconds of all seeds by those of the first seed, trained in turns.
    """
    alone = {
        each: [results.get(Run(task, optimizer, each, seed, "none")) for seed in seeds]
        for each in RATES[optimizer]
    }
    if rate is None:
        rate = min(alone, key=lambda each: _mean(alone[each]))
    preconditioned = [results.get(Run(task, optimizer, rate, seed, kfac)) for seed in seeds]
    if turns:
        run = Run(task, optimizer, rate, seeds[0], "none")
        seconds, kfac_seconds = time_in_turns(run, replace(run, kfac=kfac))
        alone[rate] = [replace(curve, seconds=seconds) for curve in alone[rate]]
        preconditioned = [replace(curve, seconds=kfac_seconds) for curve in preconditioned]
    return Comparison(task, optimizer, rate, alone[rate], preconditioned)


def _final(curves: Sequence[Curve]) -> list[float]:
    return [curve.metric[-1] for curve in curves]


def _mean(curves: Sequence[Curve]) -> float:
    return statistics.fmean(_final(curves))


def _with_range(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tasks", default=",".join(TASKS), help="some of the tasks")
    parser.add_argument("--optimizers", default="sgd,adamw", help="sgd, adamw or both")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--kfac", type=json.loads, default={}, help="options of KFAC, as JSON")
    parser.add_argument("--turns", action="store_true", help="measure seconds again, in turns")
    parser.add_argument("--all-rates", action="store_true", help="K-FAC at each usual rate")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of finished runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results, kfac = Results(arguments.results), kfac_options(arguments.kfac)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    if arguments.turns:
        # The first K-FAC of a process loads libraries, which belongs to no row.
        train(Run(next(iter(TASKS)), "sgd", 0.03, 0, kfac))
    comparisons = []
    for task in arguments.tasks.split(","):
        for optimizer in arguments.optimizers.split(","):
            for rate in RATES[optimizer] if arguments.all_rates else (None,):
                row = compare(
                    results, task, optimizer, seeds, kfac, turns=arguments.turns, rate=rate
                )
                comparisons.append(row)
    print(HEADER, *(c.row() for c in comparisons), sep="\n")
    better = sum(c.gain > 0 for c in comparisons)
    worse = sum(c.gain < -c.range for c in comparisons)
    print(f"\nK-FAC is better in {better} of {len(comparisons)} pairs; it is worse by more than")
    print(f"the seeds' range in {worse}.")


if __name__ == "__main__":
    main()
