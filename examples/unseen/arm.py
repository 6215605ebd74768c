"""Regression on a table: the torques of an arm with two joints, from angles, speeds, accelerations.

The equations are those of the planar arm with two links of 1 m and 1 kg, whose masses are at the
ends (Spong, Hutchinson and Vidyasagar, Robot Modeling and Control, section 7.4).
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from kfac_bench import Problem

EXAMPLES, GRAVITY = 12_000, 9.81

angle = (torch.rand(EXAMPLES, 2) * 2 - 1) * torch.pi
speed, acceleration = torch.randn(EXAMPLES, 2), torch.randn(EXAMPLES, 2)
(a1, a2), (v1, v2), (w1, w2) = angle.T, speed.T, acceleration.T
pull_1, pull_2 = 2 * GRAVITY * a1.cos() + GRAVITY * (a1 + a2).cos(), GRAVITY * (a1 + a2).cos()
torque_1 = (3 + 2 * a2.cos()) * w1 + (1 + a2.cos()) * w2 - a2.sin() * (2 * v1 * v2 + v2**2) + pull_1
torque_2 = (1 + a2.cos()) * w1 + w2 + a2.sin() * v1**2 + pull_2

x = torch.cat([angle, speed, acceleration], dim=1)
y = torch.stack([torque_1, torque_2], dim=1)
x, y = ((t - t.mean(0)) / t.std(0) for t in (x, y))


def network():
    return nn.Sequential(
        nn.Linear(6, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 2)
    )


def squared_error(model, batch):
    x, y = batch
    return (model(x) - y).square().mean(1)


problem = Problem(
    model=network,
    train=TensorDataset(x[2_000:], y[2_000:]),
    validation=TensorDataset(x[:2_000], y[:2_000]),
    loss=nn.MSELoss(),
    metric=squared_error,
    higher_is_better=False,
    batch_size=250,
    target=1e-3,
    likelihood="gaussian",
    curvature=1,
)
