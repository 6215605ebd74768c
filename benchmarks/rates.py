"""Steps to a target by learning rate, for AdamW and EigenAdam.

The page docs/lab/eigen_adam.md shows the table.

    python benchmarks/rates.py [--tasks NAME,...] [--seeds 0,1,2] [--rates 0.001,...]
    python benchmarks/rates.py --only EigenAdam --rates 0.003 --options '{"betas": [0.9, 0.95]}'

The tasks are the seven small ones of ``benchmarks/develop_tasks.py``, and its GRU if ``--tasks``
names it. Rates are constant, all other
options are the defaults. ``--options`` are JSON options of EigenAdam instead of the defaults. The
target of a task is written in :data:`TARGETS`. A cell has the median steps of the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

# A file that is started directly does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import defaults, tables
from benchmarks.develop_tasks import GRU, TASKS
from kfac_bench import eigen_adam

RATES = "0.001,0.003,0.01,0.03"


@dataclass(frozen=True)
class Target:
    """The end of a run: the first evaluation that reaches ``metric``, or ``steps``."""

    metric: float
    batch_size: int
    steps: int
    every: int
    """Steps between evaluations."""


TARGETS = {
    "digits MLP": Target(0.0923, 64, 300, 10),
    "digits conv net": Target(0.0548, 64, 300, 10),
    "digits autoencoder": Target(0.6, 449, 1000, 10),
    "digits ResNet-8": Target(0.12, 256, 150, 5),
    "pictures U-Net": Target(3.98, 64, 300, 5),
    "pydoc transformer": Target(2.2, 32, 500, 10),
    "digits VAE": Target(22.84, 64, 1000, 50),
    GRU.name: Target(1.75, 64, 400, 10),
}
"""AdamW's final metrics of docs/lab/defaults.md for the MLP, convolutional net and
the VAE, a loss of 0.12 for ResNet-8, and 1.75 for the GRU. The others are those of
conf/experiment/embedded."""

Build = Callable[[nn.Module, float], Optimizer]


def optimizers(options: dict[str, Any]) -> dict[str, Build]:
    """Return by name what builds an optimizer of a model with a learning rate."""
    return {
        "AdamW": lambda model, rate: AdamW(model.parameters(), rate),
        "EigenAdam": lambda model, rate: eigen_adam(model, rate, **options),
    }


def train(name: str, build: Build, rate: float, seed: int) -> tuple[float, float]:
    """Return the steps to the target, infinite if missed, and the CPU seconds of a step."""
    target = TARGETS[name]
    task = replace(
        (TASKS | {GRU.name: GRU})[name], batch_size=target.batch_size, steps=target.steps
    )
    data = task.data()
    torch.manual_seed(seed)
    model, objective = task.model(), task.objective()
    stepper, seconds = build(model, rate), 0.0
    batches = defaults._batches(data, task, seed)
    for step in range(1, target.steps + 1):
        batch = data.prepare(next(batches))
        start = time.process_time()
        stepper.zero_grad()
        loss, output = objective.forward(model, batch)  # type: ignore[attr-defined]
        if (kfac := getattr(stepper, "preconditioner", None)) is not None:
            # Only sampled Fishers need it; for others it returns at once.
            curvature = getattr(objective, "curvature", 1.0)
            kfac.fisher_backward(output, getattr(objective, "likelihood", ""), curvature=curvature)
        loss.backward()
        stepper.step()
        seconds += time.process_time() - start
        if step % target.every == 0:
            metric = defaults._evaluate(model, data, objective, task)
            if metric <= target.metric:
                return step, seconds / step
            if not math.isfinite(metric):
                break
    return math.inf, seconds / step


def main(arguments: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rates", default=RATES)
    parser.add_argument("--only", choices=["AdamW", "EigenAdam"])
    parser.add_argument("--options", type=json.loads, default={})
    parsed = parser.parse_args(arguments)
    unknown = [name for name in parsed.tasks.split(",") if name not in TARGETS]
    if unknown:
        print(f"rates.py: unknown task {unknown[0]!r}: choose from {', '.join(TARGETS)}")
        return 2
    torch.set_num_threads(1)
    rows, rates = [], [float(rate) for rate in parsed.rates.split(",")]
    for name in parsed.tasks.split(","):
        for optimizer, build in optimizers(parsed.options).items():
            if parsed.only not in (None, optimizer):
                continue
            cells, step_s = [], []
            for rate in rates:
                runs = [train(name, build, rate, int(s)) for s in parsed.seeds.split(",")]
                median = statistics.median(steps for steps, _ in runs)
                cells.append("missed" if math.isinf(median) else f"{median:g}")
                step_s += [seconds for _, seconds in runs]
            rows.append([name, optimizer, *cells, f"{1e3 * statistics.median(step_s):.2f}"])
            print(*rows[-1], file=sys.stderr, flush=True)
    header = ["task", "optimizer", *(f"rate {rate:g}" for rate in rates), "ms per step"]
    print(tables.table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
