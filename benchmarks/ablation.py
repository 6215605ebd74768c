"""An ablation of EigenAdam: which part helps on which task.

    python benchmarks/ablation.py [--tasks NAME,...] [--seeds 0,1,2] [--rates 0.003,0.01]

Each row is EigenAdam with one part replaced: the basis, orthogonalization, the Fisher, or the power
of the second moment. A cell has the median steps to the target of ``benchmarks/rates.py``, for the
better one of the rates. All other options are the defaults.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# A file that is started directly does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rates, tables
from kfac_bench import eigen_adam
from kfac_bench.core.execution.adam import AdamOptions
from kfac_bench.core.execution.decomposition import Decomposition, Eigen, FactorKey
from kfac_bench.core.execution.executor import Executor
from kfac_bench.core.execution.solver import FactorBatch, Solver
from kfac_bench.core.kernels import linalg
from kfac_bench.core.planning.layer_spec import Factor, LayerSpec

TASKS = "digits autoencoder,digits ResNet-8,pictures U-Net,pydoc transformer"
DECAY = 0.8
"""Weight of the old factor in Shampoo's running averages, as K-FAC's factors have it."""


@dataclass(frozen=True)
class Variant:
    """EigenAdam with one part replaced.

    Attributes:
        basis: ``kfac``, ``shampoo``, ``A``, ``G`` or ``none``: whose eigenvectors are used.
        power: D = U / V^power; 1/2 is Adam. D keeps the root mean square that 1/2 gives.
        options: Options of :func:`eigen_adam`.
    """

    basis: str = "kfac"
    power: float = 0.5
    options: Mapping[str, Any] | None = None

    def build(self, model: nn.Module, rate: float) -> Optimizer:
        """Return the optimizer of a model."""
        optimizer = eigen_adam(model, rate, **(self.options or {}))
        if self.basis != "kfac" or self.power != 0.5:
            executor = optimizer.preconditioner._executor
            executor.solver = AblatedSolver(executor, self)
        return optimizer


class AblatedSolver(Solver):
    """The linear algebra of one process, with other bases or another power."""

    def __init__(self, executor: Executor, variant: Variant) -> None:
        super().__init__(executor.store, adam=executor.solver.adam)
        self._executor, self._variant = executor, variant
        self._running: dict[FactorKey, Tensor] = {}

    def batch(
        self,
        members: Sequence[tuple[LayerSpec, Factor]],
        damping: float | None,
        *,
        copy: bool = False,
    ) -> FactorBatch:
        """Return the factors to decompose; for Shampoo those of the gradients."""
        batch = super().batch(members, damping, copy=copy)
        if self._variant.basis != "shampoo":
            return batch
        return replace(batch, matrices=tuple(self._of_gradient(*each) for each in members))

    def _of_gradient(self, spec: LayerSpec, factor: Factor) -> Tensor:
        """Return the running average of W^T W (for A) or W W^T (for G) of the gradients W."""
        grad = self._executor.gradients.whole[spec.name]
        if factor == "A":
            grad = grad.mT
        new = grad.square().sum(-1) if spec.is_diagonal(factor) else grad @ grad.mT
        old = self._running.get((spec.name, factor))
        self._running[spec.name, factor] = new if old is None else torch.lerp(new, old, DECAY)
        return self._running[spec.name, factor]

    def solve(self, batch: FactorBatch) -> dict[FactorKey, Decomposition]:
        """Return decompositions; the identity for a side without eigenvectors."""
        made, basis = super().solve(batch), self._variant.basis
        for (name, factor), each in made.items():
            if isinstance(each, Eigen) and basis not in ("kfac", "shampoo", factor):
                eye = torch.eye(each.vectors.shape[-1]).expand_as(each.vectors).contiguous()
                made[name, factor] = Eigen(each.values, eye)
        return made

    def _adam_step(
        self,
        specs: Sequence[LayerSpec],
        grad: Tensor,
        options: Mapping[str, AdamOptions],
        is_scaled: bool,
    ) -> Tensor:
        """Return the direction of the rule with another power of the second moment."""
        if self._variant.power == 0.5:
            return super()._adam_step(specs, grad, options, is_scaled)
        rule, spec = self.adam, specs[0]
        moments = self._store.stacked_adam(specs, grad)
        assert rule is not None
        assert moments is not None
        a, g = self._bases_of(specs)
        rotated = linalg.rotate(grad, a, g)
        moments.take_up(rotated, rule)
        beta1, beta2 = rule.betas
        old_part = beta1 / (1 - beta1 ** (moments.steps + 1))
        update = moments.first * old_part + rotated * (1 - beta1)
        second = moments.second / (1 - beta2 ** (moments.steps + 1))
        of_adam = update / (second.sqrt() + rule.eps)
        update = update / (second**self._variant.power + rule.eps ** (2 * self._variant.power))
        update = update * (_norm(of_adam) / _norm(update))
        if spec.is_orthogonalized:
            p = linalg.orthogonalizer(update @ update.mT, rule.options["orthogonal_steps"])
            update = p @ update * (rule.options["orthogonal_scale"] * max(grad.shape[-2:]) ** 0.5)
        else:
            update = update * rule.options["scale"]
        update = linalg.rotate(update, None if a is None else a.mT, None if g is None else g.mT)
        for each in specs:
            self._store.adam[each.name].steps += 1
        limit = rule.limit(options[spec.name].lr, spec.fan_in)
        return update if limit is None else linalg.clip_root_mean_square(update, limit)


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return norm.clamp_min(1e-30)


PLAIN = {"orthogonalize": "none"}
VARIANTS = {
    "EigenAdam": Variant(),
    "Shampoo's eigenvectors": Variant("shampoo"),
    "eigenvectors of A alone": Variant("A"),
    "eigenvectors of G alone": Variant("G"),
    "no eigenvectors": Variant("none"),
    "not orthogonalized": Variant(options=PLAIN),
    "not orthogonalized, Shampoo's eigenvectors": Variant("shampoo", options=PLAIN),
    "not orthogonalized, eigenvectors of A alone": Variant("A", options=PLAIN),
    "not orthogonalized, eigenvectors of G alone": Variant("G", options=PLAIN),
    "not orthogonalized, no eigenvectors (Adam)": Variant("none", options=PLAIN),
    "sampled Fisher": Variant(options={"kfac": {"fisher": "mc"}}),
    "power 3/4": Variant(power=0.75),
    "power 1": Variant(power=1.0),
    "power 3/4, not orthogonalized": Variant(power=0.75, options=PLAIN),
    "power 1, not orthogonalized": Variant(power=1.0, options=PLAIN),
    "no update clipping": Variant(options={"update_clip": None}),
}


def median_steps(variant: Variant, task: str, at: Sequence[float], seeds: Sequence[int]) -> str:
    """Return the median steps of the seeds, of the rate with the smallest, as text."""
    medians = [
        statistics.median(rates.train(task, variant.build, rate, seed)[0] for seed in seeds)
        for rate in at
    ]
    best = min(medians)
    return "missed" if math.isinf(best) else f"{best:g}"


def main(arguments: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rates", default="0.003,0.01")
    parsed = parser.parse_args(arguments)
    tasks = parsed.tasks.split(",")
    if unknown := [name for name in tasks if name not in rates.TARGETS]:
        print(f"ablation.py: unknown task {unknown[0]!r}: choose from {', '.join(rates.TARGETS)}")
        return 2
    at = [float(rate) for rate in parsed.rates.split(",")]
    seeds = [int(seed) for seed in parsed.seeds.split(",")]
    torch.set_num_threads(1)
    rows = []
    for name, variant in VARIANTS.items():
        rows.append([name, *(median_steps(variant, task, at, seeds) for task in tasks)])
        print(*rows[-1], file=sys.stderr, flush=True)
    print(tables.table(["variant", *tasks], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
