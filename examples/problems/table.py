"""Regression on a table: the progress of diabetes in a year, from ten numbers of a patient.

Run: kfac-train problem=examples/problems/table.py optimizer.lr=0.05 trainer.max_epochs=50
"""

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import TensorDataset, random_split

from kfac_bench import Problem

patients = load_diabetes(scaled=False)
x = torch.tensor(patients.data, dtype=torch.float32)
y = torch.tensor(patients.target, dtype=torch.float32).unsqueeze(1)
x, y = ((t - t.mean(0)) / t.std(0) for t in (x, y))
train, validation = random_split(TensorDataset(x, y), [342, 100])  # the same split at each start


def network():
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))


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
    batch_size=57,
    likelihood="gaussian",
    curvature=2,
)
