"""Reading Python's language reference, which the module `pydoc` contains, by character.

It is half a megabyte of English under the PSF licence, on every machine and without a download. The
text depends on the version of Python. Every eighth topic is held out.
"""

import pydoc_data.topics

import numpy as np
import torch
from torch import Tensor

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.in_memory import InMemory
from kfac_bench.errors import UsageError

SYMBOLS = 96
"""The 95 printable ASCII characters and the line end. Other characters become spaces."""
HELD_OUT = 8
EVAL_SIZE = 512


def load(sequence_length: int = 64) -> InMemory:
    """Return windows of text: characters int64 [n, L], and the next character of each [n, L].

    Windows do not overlap. The end of a topic that does not fill a window is left out. The 512
    windows of the evaluation set are evenly chosen and the same for all seeds.

    Raises:
        UsageError: The windows are longer than all topics.
    """
    topics = [encode(text) for _, text in sorted(pydoc_data.topics.topics.items())]
    splits = [t for i, t in enumerate(topics) if i % HELD_OUT], topics[::HELD_OUT]
    train, held_out = (_windows(split, sequence_length) for split in splits)
    if not len(train) or not len(held_out):
        most = min(max(len(topic) for topic in split) for split in splits) - 1
        raise UsageError(
            f"data.sequence_length={sequence_length}: no topic of pydoc is so long. "
            f"Set data.sequence_length to {most} or less"
        )
    count = min(EVAL_SIZE, len(held_out))
    evaluation = held_out[torch.arange(count) * len(held_out) // count]
    return InMemory(
        "pydoc",
        (train,),
        (evaluation,),
        shape=(sequence_length,),
        num_classes=SYMBOLS,
        prepare=_prepare,
    )


def encode(text: str) -> Tensor:
    """Return the characters as numbers below SYMBOLS, uint8."""
    raw = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)
    symbols = np.where(raw == ord("\n"), SYMBOLS - 1, raw - ord(" "))
    symbols[(symbols < 0) | (symbols >= SYMBOLS)] = 0
    return torch.from_numpy(symbols.astype(np.uint8))


def decode(symbols: Tensor) -> str:
    """Return the text of encoded characters, the inverse of `encode`."""
    return "".join("\n" if s == SYMBOLS - 1 else chr(s + ord(" ")) for s in symbols.tolist())


def _windows(topics: list[Tensor], length: int) -> Tensor:
    """Return windows [n, length + 1]. The last character of a window is the first of the next."""
    made = [t.unfold(0, length + 1, length) for t in topics if len(t) > length]
    return torch.cat(made) if made else torch.empty(0, length + 1, dtype=torch.uint8)


def _prepare(batch: Batch) -> Batch:
    windows = batch[0].long()
    return windows[:, :-1], windows[:, 1:]
