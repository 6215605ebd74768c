"""Measure what clipping the gradient norm does before K-FAC, and after it.

Run: python benchmarks/clipping.py            (a CPU is enough; it takes about two minutes)

The task is a perceptron on scikit-learn's digits, trained with SGD with momentum for 200 steps.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tables import table
from kfac_bench.core import KFAC

ORDERS = ("before K-FAC", "after K-FAC", "never")


@dataclass(frozen=True)
class Trained:
    """One training."""

    loss: float
    """Cross entropy over all examples, after the last step."""
    norm: float
    """Median norm of the gradient where it was clipped."""


def digits() -> tuple[Tensor, Tensor]:
    """Return all pictures and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def train(order: str, *, lr: float, max_norm: float, seed: int, steps: int) -> Trained:
    """Train with one order of clipping and K-FAC."""
    torch.manual_seed(seed)
    images, labels = digits()
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    preconditioner = KFAC(
        model,
        optimizer,
        damping=1e-3,
        method="eigen",
        trust_ratio=None,
        kl_clip=1e-3,
        update_freq=100,
        factor_update_freq=10,
        early_updates=False,
    )
    norms = []
    for _ in range(steps):
        chosen = torch.randperm(len(labels))[:128]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        if order == "before K-FAC":
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        preconditioner.step()
        if order == "after K-FAC":
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    with torch.no_grad():
        final = F.cross_entropy(model(images), labels).item()
    # The median over seeds needs an order, which NaN does not have.
    return Trained(final if math.isfinite(final) else math.inf, median(norms) if norms else 0.0)


def rows(seeds: int, steps: int) -> list[list[str]]:
    """Return the rows of the table: medians over ``seeds``."""
    found = []
    for lr in (0.01, 0.1):
        for max_norm in (0.1, 1.0):
            row = [f"{lr:g}", f"{max_norm:g}"]
            for order in ORDERS:
                done = [
                    train(order, lr=lr, max_norm=max_norm, seed=seed, steps=steps)
                    for seed in range(seeds)
                ]
                norm = median(d.norm for d in done)
                row.append(f"{median(d.loss for d in done):.3f}")
                if norm:
                    row[-1] += f" (norm {norm:.2g})"
            found.append(row)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    head = ["learning rate", "max_norm", *(f"clip {order}" for order in ORDERS)]
    print(table(head, rows(options.seeds, options.steps)))


if __name__ == "__main__":
    main()
