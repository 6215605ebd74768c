"""Small tasks on which covering recurrent layers and transposed convolutions pays, per step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_bench.core import KFAC

STEPS = 50


class Tokens(nn.Module):
    """A tag or the next token for each of 12 tokens."""

    def __init__(self, recurrent):
        super().__init__()
        self.tokens = nn.Embedding(12, 16)
        self.recurrent = recurrent
        self.head = nn.Linear(32 * (1 + recurrent.bidirectional), 12)

    def forward(self, x):
        return self.head(self.recurrent(self.tokens(x))[0])


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LanguageModel:
    """The next token is the sum of the last two, modulo 12."""

    kind, likelihood, rate, damping = "LSTM", "categorical", 0.1, 0.03
    loss = staticmethod(token_loss)

    @staticmethod
    def model():
        return Tokens(nn.LSTM(16, 32, batch_first=True))

    @staticmethod
    def batch(generator):
        x = torch.randint(12, (16, 22), generator=generator)
        for t in range(2, 22):
            x[:, t] = (x[:, t - 1] + x[:, t - 2]) % 12
        return x[:, :-1], x[:, 1:]


class Tagging:
    """A tag says whether the left neighbour is below the right one, and whether a token is odd."""

    kind, likelihood, rate, damping = "GRU", "categorical", 0.03, 0.03
    loss = staticmethod(token_loss)

    @staticmethod
    def model():
        return Tokens(nn.GRU(16, 32, batch_first=True, bidirectional=True))

    @staticmethod
    def batch(generator):
        x = torch.randint(12, (16, 12), generator=generator)
        y = torch.zeros_like(x)
        y[:, 1:-1] = (x[:, :-2] < x[:, 2:]) * 2 + x[:, 1:-1] % 2
        return x, y


class Decoding:
    """A picture of a spot from its position and its width."""

    kind, likelihood, rate, damping = "ConvTranspose", "gaussian", 0.01, 0.03

    @staticmethod
    def model():
        return nn.Sequential(
            nn.Linear(3, 64),
            nn.LeakyReLU(0.1),
            nn.Unflatten(1, (16, 2, 2)),
            nn.ConvTranspose2d(16, 8, 4, 2, 1),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose2d(8, 4, 4, 2, 1),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose2d(4, 1, 3, 1, 1),
        )

    @staticmethod
    def loss(output, picture):
        return (output - picture).square().sum() / 2 / len(output)

    @staticmethod
    def batch(generator):
        z = torch.rand(32, 3, generator=generator)
        x, y, width = (7 * z[:, 0], 7 * z[:, 1], 1 + 3 * z[:, 2])
        line = torch.arange(8.0)
        columns = (line - x[:, None]).square()[:, None]
        rows = (line - y[:, None]).square()[:, :, None]
        return z, torch.exp(-(rows + columns) / width[:, None, None]).unsqueeze(1)


def final_loss(task, skip):
    """Mean loss of the last five of some steps."""
    torch.manual_seed(0)
    model, generator = task.model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.rate, momentum=0.9)
    kfac = KFAC(
        model,
        optimizer,
        method="eigen",
        damping=task.damping,
        trust_ratio=None,
        grafting=False,
        update_freq=5,
        factor_update_freq=1,
        skip=["Embedding", *skip],
        fisher="mc" if task.likelihood == "gaussian" else "empirical",
        kl_clip=1e-3 if task.likelihood == "gaussian" else 1e-2,
    )
    losses = []
    for _ in range(STEPS):
        x, y = task.batch(generator)
        optimizer.zero_grad()
        output = model(x)
        kfac.fisher_backward(output, task.likelihood)
        loss = task.loss(output, y)
        loss.backward()
        kfac.step()
        optimizer.step()
        losses.append(loss.item())
    kfac.detach()
    return sum(losses[-5:]) / 5


@pytest.mark.parametrize("task", [LanguageModel, Tagging, Decoding])
def test_covering_the_layers_lowers_the_loss_per_step(task):
    assert final_loss(task, []) < 0.75 * final_loss(task, [task.kind])
