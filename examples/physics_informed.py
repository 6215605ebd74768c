"""A heat equation as a loss: K-FAC, Adam and L-BFGS after equal processor time.

Run: OMP_NUM_THREADS=1 python examples/physics_informed.py. Each optimizer gets four trials on seed
0, and the best setting runs on seeds 1 to 3.
"""

import argparse
import json
import math
import statistics
import sys
import time
from itertools import pairwise

import torch
from torch import nn

from kfac_bench import KFAC

CONDUCTIVITY, POINTS = 0.1, 512
SETTINGS = {
    "K-FAC": [0.1, 0.3, 1.0, 3.0],  # learning rates
    "Adam": [1e-3, 3e-3, 1e-2, 3e-2],
    "L-BFGS": [10, 30, 100, 300],  # lengths of the history; a line search finds the rate
}


def exact(points):
    """Return u at points (x, t): two sines that decay."""
    x, t = points.T
    waves = ((1.0, 1), (0.5, 3))
    return sum(
        size * torch.exp(-CONDUCTIVITY * (math.pi * n) ** 2 * t) * torch.sin(math.pi * n * x)
        for size, n in waves
    )[:, None]


def residual(model, points):
    """Return u_t - k u_xx at points (x, t)."""
    points = points.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
    return first[:, 1:] - CONDUCTIVITY * second[:, :1]


def network(widths=(2, 32, 32, 32, 1)):
    """Return a network with tanh between its layers."""
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def edge_points():
    """Return points: half of them at t = 0, a quarter at x = 0 and a quarter at x = 1."""
    points = torch.rand(POINTS, 2)
    points[: POINTS // 2, 1] = 0
    points[POINTS // 2 :, 0] = torch.arange(POINTS // 2) % 2
    return points


def train(name, setting, seed, seconds):
    """Return the relative L2 error of u after some seconds of processor time, and the steps."""
    torch.manual_seed(seed)
    model, inside, edge = network(), torch.rand(POINTS, 2), edge_points()
    values, kfac = exact(edge), None
    if name == "L-BFGS":
        # Without tolerances, L-BFGS uses all of its time.
        optimizer = torch.optim.LBFGS(
            model.parameters(), history_size=setting, line_search_fn="strong_wolfe",
            tolerance_grad=0, tolerance_change=0,
        )  # fmt: skip
    elif name == "Adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=setting)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=setting, momentum=0.9)
        kfac = KFAC(
            model, optimizer, fisher="type2", damping=1e-3, grafting=False,
            update_freq=10, factor_update_freq=2,
        )  # fmt: skip

    def closure():
        optimizer.zero_grad()
        loss = 0.0
        for part in (lambda: residual(model, inside), lambda: model(edge) - values):
            error = part()
            if kfac is not None:
                kfac.fisher_backward(error, "gaussian")
            loss = loss + error.square().mean() / 2
        loss.backward()
        if kfac is not None:
            kfac.step()
        return loss

    steps, begin = 0, time.process_time()
    while (spent := (time.process_time() - begin) / seconds) < 1:
        if name != "L-BFGS":
            optimizer.param_groups[0]["lr"] = setting * (1 - spent)
        optimizer.step(closure)
        steps += 1
    if kfac is not None:
        kfac.detach()
    grid = torch.cartesian_prod(*[torch.linspace(0, 1, 65)] * 2)
    with torch.no_grad():
        return float((model(grid) - exact(grid)).norm() / exact(grid).norm()), steps


def main():
    """Tune each optimizer on seed 0, then print its errors on the other seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="processor time of a run")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    print("| optimizer | setting | error, median | smallest | largest | steps |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, settings in SETTINGS.items():
        trials = {setting: train(name, setting, 0, options.seconds)[0] for setting in settings}
        best = min(settings, key=lambda s: trials[s] if math.isfinite(trials[s]) else math.inf)
        runs = [train(name, best, 1 + seed, options.seconds) for seed in range(options.seeds)]
        errors, steps = zip(*runs, strict=True)
        middle = statistics.median(errors)
        numbers = f"{middle:.2g} | {min(errors):.2g} | {max(errors):.2g}"
        print(f"| {name} | {best:g} | {numbers} | {statistics.median(steps):.0f} |", flush=True)
        raw = {"optimizer": name, "trials": trials, "best": best, "runs": runs}
        print(json.dumps(raw), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
