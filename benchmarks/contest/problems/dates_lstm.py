"""A sequence-to-sequence LSTM that writes dates in one form: "Tue 3 March 98" as "1998-03-03".

The dates are drawn at random, from 1970 to 2049, in six forms. The decoder sees the right signs so
far. It starts with the state in which the encoder has ended.
"""

import datetime
import random

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from kfac_bench import Problem

FORMS = "%d %B %Y", "%a %d %b %y", "%B %d, %Y", "%d/%m/%Y", "%m-%d-%y", "%A, %d. %B %Y"
LENGTH, SIGNS, START = 32, 128, 1


def codes(text: str) -> list[int]:
    """Return the numbers of the signs."""
    return [ord(sign) for sign in text]


def dates(count: int, seed: int) -> TensorDataset:
    """Return texts [count, 32], filled up with 0, and dates [count, 10]."""
    draw, first = random.Random(seed), datetime.date(1970, 1, 1)  # noqa: S311
    days = [first + datetime.timedelta(draw.randrange(80 * 365)) for _ in range(count)]
    texts = [day.strftime(draw.choice(FORMS)).ljust(LENGTH, "\0") for day in days]
    return TensorDataset(
        torch.tensor([codes(text) for text in texts]),
        torch.tensor([codes(day.isoformat()) for day in days]),
    )


class Translator(nn.Module):
    """An encoder and a decoder of one LSTM layer each, and a linear layer to the signs."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.signs = nn.Embedding(SIGNS, 32)
        self.encoder = nn.LSTM(32, width, batch_first=True)
        self.decoder = nn.LSTM(32, width, batch_first=True)
        self.head = nn.Linear(width, SIGNS)

    def forward(self, text: Tensor, date: Tensor) -> Tensor:
        """Return the logits of each sign of the date, [n, 10, signs]."""
        _, state = self.encoder(self.signs(text))
        before = functional.pad(date[:, :-1], (1, 0), value=START)
        logits: Tensor = self.head(self.decoder(self.signs(before), state)[0])
        return logits


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy of a sign, and the logits."""
    logits = model(*batch)
    return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()), logits


def nats_per_sign(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of each date."""
    return functional.cross_entropy(model(*batch).mT, batch[1], reduction="none").mean(1)


def problem() -> Problem:
    """Return the problem."""
    return Problem(
        model=Translator,
        train=dates(10_000, 0),
        validation=dates(500, 1),
        loss=loss,
        metric=nats_per_sign,
        higher_is_better=False,
        batch_size=64,
        likelihood="categorical",
    )
