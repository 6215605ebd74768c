"""A small U-Net that finds discs in noise; each training picture is drawn when it is read.

Run: kfac-train problem=examples/problems/pictures.py optimizer.lr=0.1 trainer.max_epochs=5
"""

import torch
from torch import nn
from torch.utils.data import Dataset

from kfac_bench import Problem


class Discs(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):  # the harness seeds torch by (seed, epoch, index)
        rows, columns = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
        x, y, radius = torch.rand(3) * 20 + 6
        mask = ((rows - x) ** 2 + (columns - y) ** 2 < (radius / 2) ** 2).float()[None]
        return mask + torch.randn(1, 32, 32), mask


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x):
        fine = self.down(x).relu()
        coarse = self.deep(nn.functional.max_pool2d(fine, 2)).relu()
        return self.head(torch.cat([fine, self.up(coarse).relu()], dim=1))


def dice(model, batch):
    pictures, masks = batch
    found = (model(pictures) > 0).float()
    return 2 * (found * masks).sum((1, 2, 3)) / (found + masks).sum((1, 2, 3))


problem = Problem(
    model=UNet,
    train=Discs(512),
    validation=Discs(64),
    loss=nn.BCEWithLogitsLoss(),
    metric=dice,
    higher_is_better=True,
    batch_size=32,
)
