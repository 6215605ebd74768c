"""``kfac-data prepare``: from documents to a vocabulary and shards of examples of one length."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kfac_bench.counted import counted
from kfac_bench.data.language import documents, text_shards, wordpiece
from kfac_bench.data.language.documents import Document
from kfac_bench.data.language.sentence_pairs import Pair, pairs
from kfac_bench.data.language.text_shards import Array, Manifest, Shard
from kfac_bench.errors import UsageError

BLOCK_CHARACTERS = 32_000_000
"""Of documents in memory at a time: they lend each other second stretches and make one shard."""
VOCABULARY_CHARACTERS = 500_000_000
"""A vocabulary is trained on this much text from the beginning."""
NAMED = 20
"""Documents left out that are named one by one; further ones are counted."""

Say = Callable[[str], None]


def prepare(
    source: Callable[[], Iterator[Document]],
    root: Path,
    *,
    vocabulary_file: Path | None = None,
    vocabulary_size: int = 30522,
    sequence_lengths: Sequence[int] = (128,),
    eval_share: float = 0.01,
    seed: int = 0,
    about: str = "",
    say: Say = lambda text: None,
) -> None:
    """Write examples of each length into `root`, in the layout of `data.language.text_shards`.

    `source()` gives the documents, each time the same ones; those without text are left out,
    counted and named by `say`, which also hears how far it is. The vocabulary is the given one,
    else that in `root`, else a new one of the text. Documents are held out for evaluation as their
    corpus says, else `eval_share` of them by a hash of their text, whatever the seed. A function of
    the arguments: the same files each time. Raises UsageError where nothing can be made of it.
    """
    if not 0 < eval_share < 1:
        raise UsageError(f"--eval-share {eval_share:g}: must be above 0 and below 1")
    if bad := [n for n in sequence_lengths if not 8 <= n <= 65_000]:
        raise UsageError(f"--sequence-length {bad[0]}: must be at least 8 and at most 65000")
    if old := sorted(set(sequence_lengths) & set(text_shards.lengths(root))):
        raise UsageError(f"{root} has text of length {old[0]} already: choose another folder")
    root.mkdir(parents=True, exist_ok=True)
    vocabulary = _vocabulary(source, root, vocabulary_file, vocabulary_size, say)
    writers = [_Writer(root, vocabulary, n, seed) for n in sorted(set(sequence_lengths))]
    skipped: list[str] = []
    count = 0
    tokenizer = wordpiece.tokenizer(vocabulary)
    for number, block in enumerate(_blocks(source(), skipped)):
        count += len(block)
        for split in text_shards.SPLITS:
            chosen = [d for d in block if _held_out(d, eval_share) == (split == "eval")]
            tokens = [t for d in chosen if (t := _tokens(tokenizer, d))]
            for writer in writers:
                writer.add(split, number, tokens)
        made = ", ".join(f"{w.count} examples of {w.length}" for w in writers)
        say(f"{count} documents, {made}")
    _say_skipped(skipped, say)
    if not count:
        raise UsageError("there is no document with text: nothing was prepared")
    told = {"source": about, "documents": count, "empty_documents": len(skipped), "seed": seed}
    for writer in writers:
        writer.finish(told)


def _vocabulary(
    source: Callable[[], Iterator[Document]], root: Path, file: Path | None, size: int, say: Say
) -> wordpiece.Vocabulary:
    """The one to use, in `root` from now on."""
    final = root / text_shards.VOCABULARY
    if file is not None:
        given = wordpiece.read(file)
        if final.exists() and wordpiece.read(final) != given:
            raise UsageError(f"{final}: another vocabulary than {file}: choose another folder")
        if not final.exists():
            shutil.copyfile(file, final)
        return given
    if final.exists():
        say(f"vocabulary: {final}, which is there already")
        return wordpiece.read(final)
    texts, characters = list[str](), 0
    for document in source():
        texts.append(document.text)
        characters += len(document.text)
        if characters > VOCABULARY_CHARACTERS:
            break
    say(f"training a vocabulary on {characters:,} characters")
    made = wordpiece.train(texts, size)
    wordpiece.write(made, final)
    return made


def _blocks(source: Iterator[Document], skipped: list[str]) -> Iterator[list[Document]]:
    """Documents with text, many at a time; the others' names go into `skipped`."""
    block, characters = list[Document](), 0
    for document in source:
        if not document.text.strip():
            skipped.append(document.where)
            continue
        block.append(document)
        characters += len(document.text)
        if characters >= BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def _held_out(document: Document, share: float) -> bool:
    if document.held_out is not None:
        return document.held_out
    digest = hashlib.sha256(document.text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _tokens(tokenizer: Any, document: Document) -> list[list[int]]:
    """Ids by sentence, of those that have any."""
    encoded = tokenizer.encode_batch(documents.sentences(document.text), add_special_tokens=False)
    return [sentence.ids for sentence in encoded if sentence.ids]


def _say_skipped(skipped: list[str], say: Say) -> None:
    if skipped:
        say(f"left out: {counted(len(skipped), 'empty document')}")
        for where in skipped[:NAMED]:
            say(f"{where}: {documents.SKIPPED}")
        if len(skipped) > NAMED:
            say(f"and {len(skipped) - NAMED} more")


class _Writer:
    """Shards of one length."""

    def __init__(
        self, root: Path, vocabulary: wordpiece.Vocabulary, length: int, seed: int
    ) -> None:
        self.length, self.count = length, 0
        self._root, self._vocabulary, self._seed = root, vocabulary, seed
        self._cls, self._sep = (vocabulary.special(t) for t in ("[CLS]", "[SEP]"))
        self._shards: dict[str, list[Shard]] = {split: [] for split in text_shards.SPLITS}

    def add(self, split: str, block: int, tokens: Sequence[Sequence[Sequence[int]]]) -> None:
        """A shard of the pairs that a block's documents make, if they make any."""
        generator = np.random.default_rng([self._seed, self.length, block, split == "eval"])
        rows = [self._row(pair) for pair in pairs(tokens, self.length - 3, generator)]
        if not rows:
            return
        name = f"text-{self.length}-{split}-{len(self._shards[split]):05d}.npy"
        partial = self._root / f"{name}.partial"
        with partial.open("wb") as file:
            np.save(file, np.stack(rows), allow_pickle=False)
        digest = text_shards.sha256(partial)
        partial.rename(self._root / name)
        self._shards[split].append(Shard(name, len(rows), digest))
        self.count += len(rows)

    def _row(self, pair: Pair) -> Array:
        first = [self._cls, *pair.first, self._sep]
        ids = list(chain(first, pair.second, [self._sep]))
        row = np.zeros(text_shards.HEADER + self.length, text_shards.dtype(len(self._vocabulary)))
        row[: text_shards.HEADER] = pair.random, len(first), len(ids)
        row[text_shards.HEADER : text_shards.HEADER + len(ids)] = ids
        return row

    def finish(self, about: dict[str, Any]) -> None:
        """Write the manifest; UsageError if a split has nothing."""
        for split, made in self._shards.items():
            if not made:
                raise UsageError(
                    f"no example of length {self.length} for {split}: more documents are needed, "
                    "or another --eval-share"
                )
        splits = {split: tuple(made) for split, made in self._shards.items()}
        vocabulary = self._root / text_shards.VOCABULARY
        text_shards.write(
            self._root,
            Manifest(
                self.length, len(self._vocabulary), text_shards.sha256(vocabulary), splits, about
            ),
        )
