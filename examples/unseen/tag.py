"""Tagging of sequences: the kind of each character in the source of Python's standard library.

A bidirectional GRU sees 64 characters and names each one's kind, which Python's own tokenizer
gave: space or layout, name, keyword, number, string, operator or comment.
"""

import keyword
import sysconfig
import tokenize
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from kfac_bench import Problem

MODULES = ["argparse", "ast", "calendar", "copy", "csv", "datetime", "decimal", "difflib", "enum",
           "fractions", "heapq", "inspect", "locale", "optparse", "pickle", "random", "statistics",
           "string", "textwrap", "typing", "uuid", "zipfile"]  # fmt: skip
HELD_OUT = ["bisect", "configparser", "doctest", "ipaddress"]
LENGTH, CHARACTERS, KINDS = 64, 128, 7
KIND = {
    tokenize.NAME: 1,
    tokenize.NUMBER: 3,
    tokenize.OP: 5,
    tokenize.COMMENT: 6,
}
# From Python 3.12 on, an f-string is several tokens: FSTRING_START, FSTRING_MIDDLE, FSTRING_END.
KIND |= {number: 4 for number, name in tokenize.tok_name.items() if "STRING" in name}


def tagged(name):
    """Return the characters of a module and the kind of each."""
    # Some of the modules are packages in newer versions of Python.
    path = Path(sysconfig.get_paths()["stdlib"]) / name
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    with tokenize.open(path) as file:
        lines = file.readlines()
    kinds = [[0] * len(line) for line in lines]
    for token in tokenize.generate_tokens(iter(lines).__next__):
        kind = 2 if keyword.iskeyword(token.string) else KIND.get(token.type, 0)
        (first, begin), (last, end) = token.start, token.end
        for row in range(first - 1, min(last, len(lines))):
            left = begin if row == first - 1 else 0
            right = end if row == last - 1 else len(lines[row])
            kinds[row][left:right] = [kind] * len(kinds[row][left:right])
    return "".join(lines), [k for line in kinds for k in line]


def sequences(names):
    texts, kinds = zip(*map(tagged, names), strict=True)
    codes = torch.tensor([min(ord(c), CHARACTERS - 1) for c in "".join(texts)])
    tags = torch.tensor([k for part in kinds for k in part])
    count = len(codes) // LENGTH
    return TensorDataset(*(t[: count * LENGTH].view(count, LENGTH) for t in (codes, tags)))


class Tagger(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, KINDS)

    def forward(self, codes):
        return self.head(self.gru(self.embedding(codes))[0]).transpose(1, 2)


def accuracy(model, batch):
    codes, tags = batch
    return (model(codes).argmax(1) == tags).float().mean(1)


train, validation = sequences(MODULES), sequences(HELD_OUT)
problem = Problem(
    model=Tagger,
    train=train,
    validation=validation,
    loss=nn.CrossEntropyLoss(),
    metric=accuracy,
    higher_is_better=True,
    batch_size=64,
    target=0.85,
)
