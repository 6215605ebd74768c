"""Handwritten digits, classified by a small convolutional network.

Run: kfac-train problem=examples/problems/digits.py optimizer=adam kfac=none
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from kfac_bench import Problem

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def accuracy(model, batch):
    images, labels = batch
    return (model(images).argmax(1) == labels).float().mean()


problem = Problem(
    model=network,
    train=TensorDataset(images[:1400], labels[:1400]),
    validation=TensorDataset(images[1400:], labels[1400:]),
    loss=nn.CrossEntropyLoss(),
    metric=accuracy,
    higher_is_better=True,
    batch_size=128,
    target=0.94,
    likelihood="categorical",
)
