"""The dataset of prepared text with masked tokens, on which BERT is pre-trained."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import Data
from kfac_bench.data.base.files import Faults, Unreadable
from kfac_bench.data.base.loader import Sample, load_batches
from kfac_bench.data.base.order import Shard, eval_indices, keyed_generator
from kfac_bench.data.language import text_shards
from kfac_bench.data.language.text_shards import HEADER, Manifest, Rows
from kfac_bench.data.language.wordpiece import SPECIAL, Vocabulary
from kfac_bench.errors import UsageError

IGNORED = -100
"""The label of a position where nothing is predicted."""

_EVALUATION = (-2, 0)
"""Replaces (seed, epoch), so that the evaluation set has the same masks in every run."""


def load(
    root: Path,
    sequence_length: int = 128,
    workers: int = 0,
    *,
    masked: float = 0.15,
    max_predictions: int = 20,
) -> Text:
    """Open the text that `kfac-data prepare` wrote into `root`.

    This function reads and hashes every shard once.

    Args:
        root: Folder of the text.
        sequence_length: Tokens of an example; the text must be prepared for this length.
        workers: Processes per rank that read ahead.
        masked: Share of the tokens that are predicted.
        max_predictions: Largest number of tokens of an example that are predicted.

    Raises:
        UsageError: A shard or the manifest is missing or damaged.
    """
    manifest, vocabulary = text_shards.read(root, sequence_length)
    if bad := text_shards.faults(root, manifest):
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise UsageError(f"{bad[0].path}: {bad[0].reason}{more}. Prepare the text again")
    return Text(root, manifest, vocabulary, workers, masked, max_predictions)


def scan(root: Path) -> tuple[str, list[Unreadable]]:
    """Return the content of `root` in words, and all faults; for `kfac-data verify`."""
    contents: list[str] = []
    faults: list[Unreadable] = []
    for length in text_shards.lengths(root):
        manifest, vocabulary = text_shards.read(root, length)
        faults += text_shards.faults(root, manifest)
        counts = " and ".join(f"{manifest.examples(s)} {s}" for s in text_shards.SPLITS)
        contents.append(f"{counts} examples of {length} tokens")
    return f"{'; '.join(contents)}; {len(vocabulary)} tokens in the vocabulary", faults


class Text(Data):
    """The dataset. `shape` is (L,), `num_classes` the size of the vocabulary.

    A batch is (inputs, labels, random), where P is `max_predictions`:

    * `inputs`: int64 `input_ids` [n, L], int64 `token_type_ids` [n, L] (0 for the first segment, 1
      for the second), bool `attention_mask` [n, L], and int64 `positions` [n, P], the masked
      positions in order, padded with zeros.
    * `labels`: int64 [n, P], the original tokens at these positions, padded with IGNORED.
    * `random`: int64 [n], 1 where the second segment does not follow the first one.

    A share `masked` of the tokens is masked, at least one and at most P. Of these 80 % become
    [MASK], 10 % become a random token, and 10 % stay. Masks depend only on (seed, epoch, index of
    the example); in evaluation they are always the same.
    """

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        vocabulary: Vocabulary,
        workers: int,
        masked: float,
        max_predictions: int,
    ) -> None:
        self.name = "text"
        self.shape: tuple[int, ...] = (manifest.sequence_length,)
        self.num_classes = len(vocabulary)
        self.tokens: Sequence[str] = vocabulary.tokens
        self.train_size, self.eval_size = (manifest.examples(s) for s in text_shards.SPLITS)
        self.faults = Faults(can_skip=False)
        self._open = (root, manifest, vocabulary, masked, max_predictions)
        self._workers, self._predictions = workers, max_predictions

    def training_batches(self, indices: Iterator[Tensor], key: tuple[int, int]) -> Iterator[Batch]:
        """Yield batches, with other masks in each epoch."""
        return self._batches(_MaskedSamples(*self._open, "train", key), indices)

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's evaluation batches; see `Data.evaluate`."""
        indices = eval_indices(self.eval_size, batch_size, shard)
        return self._batches(_MaskedSamples(*self._open, "eval", _EVALUATION), indices)

    def fingerprint_parts(self, split: str) -> Iterable[bytes]:
        """Yield the hashes of the vocabulary and the shards; see `Data.fingerprint_parts`."""
        manifest = self._open[1]
        shards = manifest.splits[split]
        return (x.encode() for x in (manifest.vocabulary_sha256, *(s.sha256 for s in shards)))

    def _batches(self, samples: _MaskedSamples, indices: Iterator[Tensor]) -> Iterator[Batch]:
        ids = torch.empty(0, *self.shape, dtype=torch.int64)
        places = torch.empty(0, self._predictions, dtype=torch.int64)
        inputs = {"input_ids": ids, "token_type_ids": ids, "attention_mask": ids.bool()}
        empty = (inputs | {"positions": places}, places, torch.empty(0, dtype=torch.int64))
        return load_batches(samples, indices, self._workers, empty, self.faults)


class _MaskedSamples(Dataset[Sample]):
    """Samples (inputs, labels, random), as a function of key and index."""

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        vocabulary: Vocabulary,
        masked: float,
        max_predictions: int,
        split: str,
        key: tuple[int, int],
    ) -> None:
        self.root, self.manifest, self.key = root, manifest, key
        self.masked, self.max_predictions = masked, max_predictions
        self.size = len(vocabulary)
        self.mask = vocabulary.special("[MASK]")
        self.special = torch.tensor([vocabulary.special(t) for t in SPECIAL if t != "[UNK]"])
        self.files = manifest.splits[split]
        self.ends = list(accumulate(f.examples for f in self.files))
        self.opened: dict[int, Rows] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Each worker maps the files into its own memory.
        return self.__dict__ | {"opened": {}}

    def __getitem__(self, index: int) -> Sample:
        number = bisect_right(self.ends, index)
        if number not in self.opened:
            try:
                rows = text_shards.open_shard(self.root, self.manifest, self.files[number])
            except UsageError as error:
                return self._changed(number, str(error))
            self.opened[number] = rows
        # A negative index counts from the end of the shard.
        row = self.opened[number][index - self.ends[number]]
        if not text_shards.well_formed(row, self.manifest):
            return self._changed(number, "it contains an invalid example")
        random, second, tokens = (int(x) for x in row[:HEADER])
        ids = torch.from_numpy(row[HEADER:].astype(np.int64))
        inside = torch.arange(len(ids))
        generator = keyed_generator(*self.key, index)
        changed, positions = self._masked(ids, tokens, generator)
        labels = torch.full((self.max_predictions,), IGNORED)
        labels[: len(positions)] = ids[positions]
        padded = torch.zeros(self.max_predictions, dtype=torch.int64)
        padded[: len(positions)] = positions
        inputs = {
            "input_ids": changed,
            "token_type_ids": ((inside >= second) & (inside < tokens)).long(),
            "attention_mask": inside < tokens,
            "positions": padded,
        }
        return inputs, labels, random

    def _changed(self, number: int, how: str) -> Unreadable:
        file = str(self.root / self.files[number].file)
        return Unreadable(file, f"it has changed since the run began ({how})")

    def _masked(self, ids: Tensor, tokens: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Return the ids with masked tokens, and the masked positions in order."""
        # Special tokens are never masked, [UNK] may be.
        candidates = (~torch.isin(ids[:tokens], self.special)).nonzero().flatten()
        count = min(self.max_predictions, max(1, round(self.masked * tokens)), len(candidates))
        chosen = candidates[torch.randperm(len(candidates), generator=generator)[:count]]
        positions = chosen.sort().values
        draw = torch.rand(count, generator=generator)
        others = torch.randint(self.size, (count,), generator=generator)
        new = torch.where(draw < 0.8, self.mask, torch.where(draw < 0.9, others, ids[positions]))
        return ids.index_copy(0, positions, new), positions
