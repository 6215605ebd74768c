"""K-FAC in Lightning: the line marked (1). Run: python examples/lightning_training.py."""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.nn import Flatten, Linear, Sequential, Tanh, functional
from torch.utils.data import DataLoader, TensorDataset

from kfac_bench.integrations.lightning import KFACCallback


class Digits(pl.LightningModule):
    """A perceptron that classifies digits."""

    def __init__(self):
        super().__init__()
        self.net = Sequential(Flatten(), Linear(64, 64), Tanh(), Linear(64, 10))

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.net(batch[0] / 16), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


digits = load_digits()
images, labels = torch.tensor(digits.images).float(), torch.tensor(digits.target)
data = TensorDataset(images[:1400], labels[:1400])  # the other images are for a test
trainer = pl.Trainer(max_epochs=5, callbacks=[KFACCallback()])  # (1)
trainer.fit(Digits(), DataLoader(data, batch_size=64, shuffle=True))
