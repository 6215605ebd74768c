"""The paper's times as observations, and the constants of Longhorn that are fitted to them.

``validate_simulation.py`` and ``benchmarks/simulation_folds.py`` use this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from kfac_bench.config import compose
from kfac_bench.simulate import hardware, workload
from kfac_bench.simulate.calibration import Constants, Observation, fit, split_epoch_s
from kfac_bench.simulate.conduct import SC20_CODE, Conduct
from kfac_bench.simulate.hardware import Hardware
from kfac_bench.simulate.step import Workload, step_time
from kfac_bench.simulate.sweep import SGD, Intervals, Variant

FOLDER = compose.CONF_DIR / "simulation"
MACHINE = compose.CONF_DIR / "hardware" / "longhorn_v100.yaml"
RANKS = 64
"""GPUs of Table 5."""
LARGEST = 4608
"""Size of the ResNets' largest factor."""
Paper = Mapping[str, Any]
Works = Mapping[str, Workload]
"""The work of one rank in a step, by model."""


def published() -> Paper:
    """Read the paper's numbers."""
    numbers: Paper = yaml.safe_load((FOLDER / "tpds2022.yaml").read_text(encoding="utf-8"))
    return numbers


def resnets(paper: Paper) -> dict[str, Workload]:
    """Return the workload of each ResNet of Table 5 on ImageNet, from dry runs."""
    batch = f"trainer.batch_size={paper['per_rank_batch']}"
    return {
        name: workload.of_config(compose.load([f"model={name}", "data=imagefolder", batch]))
        for name in paper["table5_minutes"]
    }


def observations(paper: Paper, name: str, work: Workload) -> dict[str | int, Observation]:
    """Return the mean steps of one model in Table 5, by ``sgd`` or K-FAC's interval."""
    found: dict[str | int, Observation] = {}
    for key, minutes in paper["table5_minutes"][name].items():
        each = Variant(SGD if key == SGD else "comm_opt")
        intervals = Intervals(1, 1) if key == SGD else Intervals(key / 10, key)
        seconds = minutes / minutes_of(paper, key, 1.0)
        found[key] = Observation(work, RANKS, each, intervals, seconds)
    return found


def minutes_of(paper: Paper, key: str | int, step_s: float) -> float:
    """Return the minutes of a training on the ranks of Table 5, from the seconds of its steps."""
    epochs = paper["epochs"]["sgd" if key == SGD else "kfac"]
    return float(epochs * steps_of(paper, RANKS) * step_s / 60)


def steps_of(paper: Paper, ranks: int) -> int:
    """Return the steps of an epoch."""
    return int(paper["images"] // (ranks * paper["per_rank_batch"]))


def blank() -> Hardware:
    """Return Longhorn without its fitted constants: one decomposition of LARGEST rows takes 1 s."""
    known = hardware.load(MACHINE)
    scale = 1 / known.rates.decompose(LARGEST, "eigen")
    return replace(Constants(0.0, 0.0, scale).of(known), epoch_s=0.0)


def fit_table5(
    paper: Paper, works: Works, known: Hardware, conduct: Conduct = SC20_CODE
) -> Constants:
    """Fit three constants to those rows of Table 5 that ``works`` has, and to nothing else."""
    rows = [observations(paper, name, work) for name, work in works.items()]
    return fit(known, [each for row in rows for each in row.values()], conduct)


def fit_machine(paper: Paper, works: Works) -> Hardware:
    """Fit Longhorn to all of Table 5, and its overhead per epoch to an efficiency of Fig. 8."""
    known = blank()
    fitted = fit_table5(paper, works, known).of(known)
    share, work = paper["fig8_efficiency"], works["resnet50"]
    ends = (share["from"], share["at"])
    times = {n: step_time(work, n, fitted, conduct=SC20_CODE) for n in ends}
    steps = {n: steps_of(paper, n) for n in (*ends, RANKS)}
    return split_epoch_s(fitted, times, steps, RANKS, share["sgd"] / 100)
