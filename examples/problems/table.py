"""Regression on a table: Friedman's function of five of ten columns (Friedman 1991), without noise.

Run: kfac-train problem=examples/problems/table.py optimizer.lr=0.05 trainer.max_epochs=50
"""

import torch
from sklearn.datasets import make_friedman1
from torch import nn
from torch.utils.data import TensorDataset, random_split

from kfac_bench import Problem

columns, value = make_friedman1(5_000, n_features=10, noise=0.0, random_state=0)
x = torch.tensor(columns, dtype=torch.float32)
y = torch.tensor(value, dtype=torch.float32).unsqueeze(1)
x, y = ((t - t.mean(0)) / t.std(0) for t in (x, y))
train, validation = random_split(TensorDataset(x, y), [4_096, 904])  # the same split at each start


def network():
    return nn.Sequential(
        nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


def squared_error(model, batch):
    x, y = batch
    return (model(x) - y).square()[:, 0]  # one number for each example


problem = Problem(
    model=network,
    train=train,
    validation=validation,
    loss=nn.MSELoss(),
    metric=squared_error,
    higher_is_better=False,
    batch_size=256,
    likelihood="gaussian",
    curvature=2,
)
