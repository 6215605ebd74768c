"""Poisson's equation on the unit square as a loss: a physics-informed network (Raissi et al. 2019).

The equation is u_xx + u_yy = f inside, and u = 0 on the edge. f is chosen so that the solution is
known. An example is one point inside and one on the edge.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from kfac_bench import Problem

WAVES = (1.0, 1, 1), (0.5, 2, 1), (0.25, 2, 3)
"""Amplitude and the number of half waves in x and in y of each part of the solution."""


def solution(points: Tensor, *, laplacian: bool = False) -> Tensor:
    """Return u at the points [n, 2], or its Laplacian, [n, 1]."""
    x, y = points.T
    parts = [
        size
        * (-((math.pi * math.hypot(i, j)) ** 2) if laplacian else 1.0)
        * torch.sin(math.pi * i * x)
        * torch.sin(math.pi * j * y)
        for size, i, j in WAVES
    ]
    return torch.stack(parts).sum(0)[:, None]


def points(count: int, seed: int) -> TensorDataset:
    """Return points inside and on the edge, [count, 2] each."""
    generator = torch.Generator().manual_seed(seed)
    inside, edge = (torch.rand(count, 2, generator=generator) for _ in range(2))
    index = torch.arange(count)
    edge[index, index % 2] = ((index // 2) % 2).float()
    return TensorDataset(inside, edge)


def network() -> nn.Module:
    """Return a network 2-64-64-64-1 with tanh."""
    layers = [m for a, b in pairwise((2, 64, 64, 64, 1)) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def errors(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the residual inside over 10, and the error on the edge, [n, 2]."""
    inside, edge = batch
    inside = inside.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(inside).sum(), inside, create_graph=True)
    second = [
        torch.autograd.grad(first[:, i].sum(), inside, create_graph=True)[0][:, i] for i in range(2)
    ]
    residual = (second[0] + second[1])[:, None] - solution(inside.detach(), laplacian=True)
    return torch.cat([residual / 10, model(edge)], 1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return half the mean squared error of an example, and the errors."""
    with torch.enable_grad():
        found = errors(model, batch)
    return found.square().sum(1).mean() / 2, found


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the squared error of u at the points inside, over the mean square of u."""
    inside, _ = batch
    power = sum(size**2 for size, _, _ in WAVES) / 4
    error: Tensor = (model(inside) - solution(inside)).square()[:, 0] / power
    return error


def problem() -> Problem:
    """Return the problem."""
    return Problem(
        model=network,
        train=points(4_096, 0),
        validation=points(1_024, 1),
        loss=loss,
        metric=squared_error,
        higher_is_better=False,
        batch_size=256,
        likelihood="gaussian",
    )
