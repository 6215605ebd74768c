"""A masked language model on the manual pages of Debian's package manpages.

A BERT of bert_tiny's size sees 32 words, of which 5 are masked, and guesses these. The vocabulary
is the 2,000 most frequent words and signs of the training pages. Every eighth page is held out.
"""

from __future__ import annotations

import gzip
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Subset, TensorDataset

from kfac_bench import Problem

if TYPE_CHECKING:
    from transformers import BertForMaskedLM

LIST = Path("/var/lib/dpkg/info/manpages.list")
UNKNOWN, MASK, WORDS, LENGTH, MASKED = 0, 1, 2_000, 32, 5


def words(path: Path) -> list[str]:
    """Return the words and signs of a manual page, without the commands of roff."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        lines = [line for line in file if not line.startswith((".", "'"))]
    text = re.sub(r"\\(f\[?\w+\]?|\(\w\w|[&^|])", "", " ".join(lines)).replace("\\", "")
    return re.findall(r"[a-z]+|\d+|[^\sa-z\d]", text.lower())


def windows(pages: list[list[str]], index: dict[str, int], seed: int) -> TensorDataset:
    """Return windows [n, 32] with masks, the masked positions [n, 5] and their words [n, 5]."""
    codes = torch.tensor([index.get(word, UNKNOWN) for page in pages for word in page])
    whole = codes[: len(codes) // LENGTH * LENGTH].view(-1, LENGTH)
    generator = torch.Generator().manual_seed(seed)
    where = torch.rand(whole.shape, generator=generator).argsort(1)[:, :MASKED]
    return TensorDataset(whole.scatter(1, where, MASK), where, whole.gather(1, where))


def model() -> BertForMaskedLM:
    """Return the BERT: two layers of width 128 and two heads."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS + 2,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=512,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def logits_of(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the logits of the masked words, [n, 5, words]."""
    masked, where, _ = batch
    hidden = model.bert(input_ids=masked).last_hidden_state
    # Other positions need no logits, which cost most of a step.
    logits: Tensor = model.cls(hidden.gather(1, where[..., None].expand(-1, -1, hidden.shape[-1])))
    return logits


def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy of the masked words, and their logits."""
    logits = logits_of(model, batch)
    return functional.cross_entropy(logits.flatten(0, 1), batch[2].flatten()), logits


def nats_per_word(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the cross entropy of each example."""
    return functional.cross_entropy(logits_of(model, batch).mT, batch[2], reduction="none").mean(1)


def problem() -> Problem:
    """Return the problem."""
    files = sorted(
        line for line in LIST.read_text().splitlines() if re.search(r"/man/man\d/.*\.gz$", line)
    )
    pages = [words(Path(file)) for file in files]
    train = [page for i, page in enumerate(pages) if i % 8]
    counts = Counter(word for page in train for word in page)
    common = sorted(counts, key=lambda word: (-counts[word], word))[:WORDS]
    index = {word: number for number, word in enumerate(common, start=2)}
    return Problem(
        model=model,
        train=windows(train, index, 0),
        validation=Subset(windows(pages[::8], index, 1), range(512)),
        loss=loss,
        metric=nats_per_word,
        higher_is_better=False,
        batch_size=32,
        likelihood="categorical",
    )
