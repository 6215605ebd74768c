"""EigenAdam on layers that are wide for their batch: budgets, and the largest rotated sides.

    python benchmarks/wide_layers.py [--seeds 0,1,2]

The autoencoder of ``benchmarks/develop_tasks.py`` gets layers of 1000, 500, 250 and 30 outputs
instead of 128, 64, 32 and 12. A batch has 449 images. A cell has medians over the seeds. The rate
of each optimizer is the one with the fewest steps among those that are listed here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

# A file that is started directly does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rates, tables
from benchmarks.develop_tasks import TASKS
from kfac_bench import eigen_adam
from kfac_bench.models.image_networks import Autoencoder
from kfac_bench.optimizers.first_order_options import MuonConfig

NAME = "wide autoencoder"
MAX_DIM = 8192, 300, 1
BUDGETS = 1, 2


def muon(model: nn.Module, rate: float) -> Optimizer:
    """Return Muon for hidden weights, with Adam at 0.003 for the others."""
    config = MuonConfig(lr=rate, momentum=0.9, adam_lr=0.003)
    return config.build([{"params": list(model.parameters())}], model)


def main(arguments: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", default="0,1,2")
    seeds = [int(seed) for seed in parser.parse_args(arguments).seeds.split(",")]
    torch.set_num_threads(1)
    TASKS[NAME] = replace(
        TASKS["digits autoencoder"], name=NAME, model=lambda: Autoencoder(64, [1000, 500, 250, 30])
    )
    rates.TARGETS[NAME] = rates.Target(0.6, 449, 400, 10)
    builds: dict[str, rates.Build] = {
        "AdamW": lambda model, rate: AdamW(model.parameters(), rate),
        "Muon": muon,
    }
    for max_dim in MAX_DIM:
        builds[f"EigenAdam, max_dim={max_dim}"] = partial(eigen_adam, kfac={"max_dim": max_dim})
    for budget in BUDGETS:
        name = f"EigenAdam, max_overhead={budget}"
        builds[name] = partial(eigen_adam, kfac={"max_overhead": budget})
    rows = []
    for optimizer, build in builds.items():
        best: tuple[float, ...] | None = None
        for rate in (0.01, 0.02) if optimizer == "Muon" else (0.003, 0.006):
            runs = [rates.train(NAME, build, rate, seed) for seed in seeds]
            steps = statistics.median(run[0] for run in runs)
            step_s = statistics.median(run[1] for run in runs)
            if best is None or steps < best[0]:
                best = steps, 1e3 * step_s, rate
        assert best is not None
        seconds = f"{best[0] * best[1] / 1e3:.1f}"
        rows.append([optimizer, f"{best[2]:g}", f"{best[0]:g}", f"{best[1]:.0f}", seconds])
    print(tables.table(["optimizer", "rate", "steps", "ms per step", "seconds"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
