"""Count the warnings of K-FAC's guards: on right scripts (false alarms) and on wrong ones.

Run: python -m benchmarks.guards            (a CPU is enough; it takes some minutes)

Each script is tried on the seven develop tasks with SGD with momentum and with AdamW.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW

from benchmarks.develop_tasks import TASKS, DevelopTask
from benchmarks.tables import table
from kfac_bench.core import KFAC
from kfac_bench.data.base.batch import Batch, size, split
from kfac_bench.data.base.dataset import Data
from kfac_bench.data.base.order import Shard


@dataclass(frozen=True)
class Script:
    """A training script: which lines it has."""

    name: str
    is_right: bool = True
    attach: bool = True
    passes_scaler: bool = True
    scale: float = 1.0
    unscales: bool = False
    max_norm: float = 0.0
    """0 for no clip."""
    parts: int = 1
    """Micro-batches."""
    is_sum: bool = False
    """True if the loss is multiplied by the number of examples."""


SCRIPTS = (
    Script("one line"),
    Script("two lines", attach=False),
    Script("clip at 1", max_norm=1.0),
    Script("clip at 0.01", max_norm=0.01),
    Script("4 micro-batches", parts=4),
    Script("GradScaler, one line", scale=2.0**16),
    Script("GradScaler and clip, one line", scale=2.0**16, unscales=True, max_norm=1.0),
    Script("GradScaler, two lines", attach=False, scale=2.0**16, unscales=True),
    Script("attach() without the scaler", False, passes_scaler=False, scale=2.0**16),
    Script(
        "the same, with clip",
        False,
        passes_scaler=False,
        scale=2.0**16,
        unscales=True,
        max_norm=1.0,
    ),
    Script(
        "two lines, scale not passed",
        False,
        attach=False,
        passes_scaler=False,
        scale=2.0**16,
        unscales=True,
    ),
    Script("two lines, not unscaled", False, attach=False, passes_scaler=False, scale=2.0**16),
    Script("sum over examples", False, is_sum=True),
)


def count_warnings(script: Script, task: DevelopTask, data: Data, kind: str, steps: int) -> int:
    """Train for some steps; return how many warnings K-FAC gave."""
    torch.manual_seed(0)
    model, objective = task.model(), task.objective()
    lr = 0.01 if kind == "sgd" else 1e-3
    optimizer: SGD | AdamW = (
        SGD(model.parameters(), lr, momentum=0.9)
        if kind == "sgd"
        else AdamW(model.parameters(), lr)
    )
    scaler = GradScaler("cpu", init_scale=script.scale, enabled=script.scale > 1)
    kfac = KFAC(
        model,
        optimizer,
        damping=0.03,
        update_freq=10,
        factor_update_freq=5,
        early_updates=False,
    )
    if script.attach:
        kfac.attach(scaler if script.passes_scaler else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in islice(_batches(data, task), steps):
            optimizer.zero_grad()
            for part in split(batch, script.parts):
                loss: Tensor = objective.forward(model, part)[0]  # type: ignore[attr-defined]
                weight = size(part) if script.is_sum else size(part) / size(batch)
                scaler.scale(loss * weight).backward()  # type: ignore[no-untyped-call]
            if script.unscales:
                scaler.unscale_(optimizer)
            if script.max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), script.max_norm)
            if not script.attach:
                kfac.step(scaler.get_scale if script.passes_scaler else 1.0)
            scaler.step(optimizer)
            scaler.update()
    kfac.detach()
    return sum("K-FAC" in str(warning.message) for warning in caught)


def _batches(data: Data, task: DevelopTask) -> Iterator[Batch]:
    for epoch in range(1000):
        for batch in data.train(task.batch_size, 0, epoch, 0, Shard(0, 1)):
            yield data.prepare(batch)


def main(argv: Sequence[str] | None = None) -> None:
    """Print in how many cases each script got a warning."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, data = [], {name: TASKS[name].data() for name in options.tasks}
    for script in SCRIPTS:
        cases = [*product(options.tasks, ("sgd", "adamw"))]
        counts = [count_warnings(script, TASKS[n], data[n], o, options.steps) for n, o in cases]
        kind = "right" if script.is_right else "wrong"
        silent = [f"{n} ({o})" for (n, o), c in zip(cases, counts, strict=True) if not c]
        warned = f"{len(cases) - len(silent)} of {len(cases)}"
        missed = "" if script.is_right or not silent else ", ".join(silent)
        rows.append([script.name, kind, warned, missed])
    print(table(["script", "kind", "warned", "missed"], rows))


if __name__ == "__main__":
    main()
