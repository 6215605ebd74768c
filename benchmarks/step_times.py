"""CPU milliseconds per step of several optimizers on two small tasks, in turns.

    python benchmarks/step_times.py [--rounds 8]

Each round runs 40 steps of every optimizer, which is one whole interval of EigenAdam. The table has
the medians of the rounds. Run it on a quiet machine; docs/lab/eigen_adam.md shows the table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

# A file that is started directly does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import defaults, tables
from benchmarks.develop_tasks import TASKS
from kfac_bench import KFAC, eigen_adam
from kfac_bench.optimizers.first_order_options import MuonConfig

STEPS = 40
"""Steps of a round."""
BATCH_SIZES = {"pydoc transformer": 32, "digits autoencoder": 449}


def muon(model: nn.Module) -> Optimizer:
    """Return Muon with Adam for the other parameters."""
    return MuonConfig("muon", lr=0.01).build([{"params": list(model.parameters())}], model)


def inverse_before_sgd(model: nn.Module) -> Optimizer:
    """Return SGD with K-FAC's inverses every 20 steps, as the contest's experiments have them."""
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    KFAC(
        model,
        optimizer,
        method="inverse",
        damping=0.1,
        trust_ratio=None,
        kl_clip=0.01,
        grafting=False,
        update_freq=20,
        factor_update_freq=20,
        factor_decay=0.8,
        skip=[],
    ).attach()
    return optimizer


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: AdamW(model.parameters(), 1e-3),
    "Muon": muon,
    "K-FAC inverse before SGD, interval 20": inverse_before_sgd,
    "EigenAdam": lambda model: eigen_adam(model, 1e-3),
    "EigenAdam, `max_dim=150`": lambda model: eigen_adam(model, 1e-3, kfac={"max_dim": 150}),
}


def measure(name: str, rounds: int) -> dict[str, float]:
    """Return milliseconds per step by optimizer; the first two rounds do not count."""
    task = replace(TASKS[name], batch_size=BATCH_SIZES[name], steps=(rounds + 2) * STEPS)
    data, runs = task.data(), []
    for optimizer, build in OPTIMIZERS.items():
        torch.manual_seed(0)
        model = task.model()
        batches = defaults._batches(data, task, seed=0)
        runs.append((optimizer, model, task.objective(), build(model), batches))
    seconds: dict[str, list[float]] = {optimizer: [] for optimizer in OPTIMIZERS}
    for _ in range(rounds + 2):
        for optimizer, model, objective, stepper, batches in runs:
            spent = 0.0
            for _ in range(STEPS):
                batch = data.prepare(next(batches))
                start = time.process_time()
                stepper.zero_grad()
                objective.forward(model, batch)[0].backward()  # type: ignore[attr-defined]
                stepper.step()
                spent += time.process_time() - start
            seconds[optimizer].append(spent / STEPS)
    return {name: 1e3 * statistics.median(times[2:]) for name, times in seconds.items()}


def main(arguments: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=8)
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    by_task = [measure(name, parsed.rounds) for name in BATCH_SIZES]
    header = ["optimizer", *(f"{name} (batch {size})" for name, size in BATCH_SIZES.items())]
    rows = [[name, *(f"{times[name]:.1f}" for times in by_task)] for name in OPTIMIZERS]
    print(tables.table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
