"""Python's language reference, as `pydoc` ships it: real text on every install, no download.

Half a megabyte of English under the PSF licence; what it says depends on the Python. Every eighth
topic is held out.
"""

import pydoc_data.topics

import numpy as np
import torch
from torch import Tensor

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.in_memory import InMemory
from kfac_bench.errors import UsageError

SYMBOLS = 96
"""The 95 printable ASCII characters, and one for a line's end; what is none of them is a space."""
HELD_OUT = 8
EVAL_SIZE = 512


def load(sequence_length: int = 64) -> InMemory:
    """Return windows of text: int64 [n, L] characters, and [n, L] the characters that follow.

    Windows do not overlap; a rest of a topic that fills none is left out. The split and the 512
    windows of the evaluation set, evenly chosen, are the same for all seeds. Raises UsageError
    where windows are longer than topics.
    """
    topics = [encode(text) for _, text in sorted(pydoc_data.topics.topics.items())]
    train = _windows([t for i, t in enumerate(topics) if i % HELD_OUT], sequence_length)
    held_out = _windows(topics[::HELD_OUT], sequence_length)
    if not len(train) or not len(held_out):
        raise UsageError(f"data.sequence_length={sequence_length}: no topic of pydoc is so long")
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
    """Characters as uint8 below :data:`SYMBOLS`."""
    raw = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)
    symbols = np.where(raw == ord("\n"), SYMBOLS - 1, raw - ord(" "))
    symbols[(symbols < 0) | (symbols >= SYMBOLS)] = 0
    return torch.from_numpy(symbols.astype(np.uint8))


def decode(symbols: Tensor) -> str:
    """What :func:`encode` was given, but for what it does not tell apart."""
    return "".join("\n" if s == SYMBOLS - 1 else chr(s + ord(" ")) for s in symbols.tolist())


def _windows(topics: list[Tensor], length: int) -> Tensor:
    """Uint8 [n, length + 1]: a window's last character is the next one's first."""
    made = [t.unfold(0, length + 1, length) for t in topics if len(t) > length]
    return torch.cat(made) if made else torch.empty(0, length + 1, dtype=torch.uint8)


def _prepare(batch: Batch) -> Batch:
    windows = batch[0].long()
    return windows[:, :-1], windows[:, 1:]
