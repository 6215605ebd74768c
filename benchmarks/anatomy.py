"""Compare the updates of EigenAdam with the updates of Adam and Muon.

    python benchmarks/anatomy.py [--tasks NAME,...] [--steps 20,60,100] [--seed 0]

It trains each task with EigenAdam. At the given steps it compares the update of each layer with the
gradient and with the updates that Adam and Muon would make after the same gradients, and it looks
at the eigenvalues of A and G. A cell is the median over layers of a kind and over the steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

# A file that is started directly does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import defaults, tables
from benchmarks.ablation import TASKS
from benchmarks.develop_tasks import TASKS as DEVELOP
from benchmarks.rates import TARGETS
from kfac_bench import eigen_adam
from kfac_bench.core.kernels import linalg
from kfac_bench.core.layers.base import Layer

RATE = 0.003
UPDATES = ("cos(EigenAdam, gradient)", "cos(EigenAdam, Adam)", "cos(EigenAdam, Muon)")
OTHERS = ("cos(Adam, gradient)", "cos(Muon, gradient)", "norm over Adam's", "norm over Muon's")
SPECTRA = ("A: largest / median", "A: share of 90 %", "G: largest / median", "G: share of 90 %")
COLUMNS = UPDATES + OTHERS + SPECTRA


@dataclass
class Shadow:
    """The moments that Adam and Muon would have after the same gradients of one layer."""

    first: Tensor
    second: Tensor
    momentum: Tensor
    steps: int = 0

    @classmethod
    def start(cls, grad: Tensor) -> Shadow:
        """Return the moments before the first gradient."""
        return cls(torch.zeros_like(grad), torch.zeros_like(grad), torch.zeros_like(grad))

    def take_up(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Take up a gradient; return the updates of Adam and of Muon at a learning rate of 1."""
        self.steps += 1
        self.first.lerp_(grad, 1 - 0.9)
        self.second.lerp_(grad.square(), 1 - 0.999)
        denominator = (self.second / (1 - 0.999**self.steps)).sqrt() + 1e-8
        adam = self.first / (1 - 0.9**self.steps) / denominator
        self.momentum.lerp_(grad, 1 - 0.95)
        nesterov = torch.lerp(grad, self.momentum, 0.95)
        p = linalg.orthogonalizer(nesterov @ nesterov.mT, steps=5)
        # Muon's usual factor, with which its updates are as long as Adam's (Liu et al. 2025).
        return adam, p @ nesterov * (0.2 * max(grad.shape[-2:]) ** 0.5)


def observe(name: str, at: Sequence[int], seed: int) -> dict[str, list[list[float]]]:
    """Train a task; return rows of :data:`COLUMNS` by kind of layer."""
    task = replace(DEVELOP[name], batch_size=TARGETS[name].batch_size, steps=max(at))
    data = task.data()
    torch.manual_seed(seed)
    model, objective = task.model(), task.objective()
    optimizer = eigen_adam(model, RATE)
    layers: list[Layer] = optimizer.preconditioner._layers
    store = optimizer.preconditioner._executor.store
    shadows: dict[str, Shadow] = {}
    rows: dict[str, list[list[float]]] = defaultdict(list)
    for step, batch in enumerate(defaults._batches(data, task, seed), 1):
        optimizer.zero_grad()
        objective.forward(model, data.prepare(batch))[0].backward()  # type: ignore[attr-defined]
        grads = {layer.name: _copy_of_gradient(layer) for layer in layers}
        optimizer.step()
        for layer in layers:
            grad = grads[layer.name]
            shadow = shadows.setdefault(layer.name, Shadow.start(grad))
            adam, muon = shadow.take_up(grad)
            if step not in at:
                continue
            update = _copy_of_gradient(layer)  # the optimizer has left the direction there
            cosines = [_cosine(update, x) for x in (grad, adam, muon)]
            cosines += [_cosine(adam, grad), _cosine(muon, grad)]
            norms = [float(update.norm() / x.norm()) for x in (adam, muon)]
            spectra = [x for f in "AG" for x in _spectrum(store.factor((layer.name, f)))]
            rows[_kind(layer, is_last=layer is layers[-1])].append([*cosines, *norms, *spectra])
        if step == max(at):
            break
    return rows


def _copy_of_gradient(layer: Layer) -> Tensor:
    grad = layer.get_grad()
    assert grad is not None
    return grad.clone()


def _cosine(x: Tensor, y: Tensor) -> float:
    return float((x * y).sum() / (x.norm() * y.norm()))


def _spectrum(factor: Tensor) -> tuple[float, float]:
    """Return largest over median eigenvalue, and the share of eigenvalues with 90 % of the sum."""
    values = factor if factor.ndim == 2 else torch.linalg.eigvalsh(factor.double())
    values = values.flatten().double().clamp_min(0).sort(descending=True).values
    count = int((values.cumsum(0) < 0.9 * values.sum()).sum()) + 1
    median = max(float(values.median()), 1e-12 * float(values[0]))
    return float(values[0]) / median, count / len(values)


def _kind(layer: Layer, *, is_last: bool) -> str:
    if layer.spec.is_lookup:
        return "embedding"
    if is_last:
        return "output"
    return "hidden linear" if layer.spec.is_orthogonalized else "convolution"


def _cell(values: Iterable[float]) -> str:
    return f"{statistics.median(values):.3g}"


def main(arguments: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--steps", default="20,60,100")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    names = parsed.tasks.split(",")
    if unknown := [name for name in names if name not in DEVELOP]:
        print(f"anatomy.py: unknown task {unknown[0]!r}: choose from {', '.join(DEVELOP)}")
        return 2
    torch.set_num_threads(1)
    rows = []
    for name in names:
        found = observe(name, [int(step) for step in parsed.steps.split(",")], parsed.seed)
        for kind, each in found.items():
            rows.append([f"{name}, {kind}", *map(_cell, zip(*each, strict=True))])
    print(tables.table(["layers", *COLUMNS], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
