"""The file of a small problem that any optimizer solves in a fraction of a second."""

PROBLEM = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

from kfac_bench import Problem

generator = torch.Generator().manual_seed(0)
x = torch.randn(900, 8, generator=generator)
y = (x @ torch.randn(8, 3, generator=generator)).argmax(1)


def network():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))


def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


problem = Problem(
    model=network,
    train=TensorDataset(x[:600], y[:600]),
    validation=TensorDataset(x[600:], y[600:]),
    loss=nn.CrossEntropyLoss(),
    metric=accuracy,
    higher_is_better=True,
    batch_size=50,
    target=0.93,
    likelihood="categorical",
)
"""


def written(folder, *changes, name="mine.py"):
    """Write the file with some text replaced; return its path."""
    text = PROBLEM
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / name
    path.write_text(text)
    return str(path)
