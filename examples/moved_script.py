"""A script of kfac-pytorch with K-FAC of this package: the old algorithm."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from kfac_bench import KFAC

pixels, classes = load_digits(return_X_y=True)
x, y = torch.tensor(pixels / 16).float(), torch.tensor(classes)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
preconditioner = KFAC(model, optimizer, preset="paper", factor_convention="kaisa", update_freq=100)
for _ in range(200):
    rows = torch.randperm(1400)[:64]  # the other images are for the test
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    preconditioner.step()
    optimizer.step()
accuracy = (model(x[1400:]).argmax(1) == y[1400:]).float().mean()
print(f"accuracy {accuracy.item():.3f}")
