"""K-FAC in your own training script: the two lines marked (1) and (2).

Run: python examples/two_lines.py            (a CPU is enough; it takes some seconds)
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from kfac_bench import KFAC

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
train, test = slice(0, 1400), slice(1400, None)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 16, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
preconditioner = KFAC(model, optimizer, damping=0.03, update_freq=10, factor_update_freq=5)  # (1)
print(preconditioner.report())

for _ in range(60):
    batch = torch.randperm(1400)[:256]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[train][batch]), y[train][batch])
    loss.backward()
    preconditioner.step()  # (2) after backward, before the optimizer
    optimizer.step()

with torch.no_grad():
    accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
print(f"loss {loss.item():.4f}  test accuracy {accuracy:.3f}")
