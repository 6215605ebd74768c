"""`kfac-data prepare`: turns documents into a vocabulary and shards of examples.

The examples are pairs of text segments, on which BERT is pre-trained; see `pairs`.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfac_bench.data.base.files import Unreadable, left_out
from kfac_bench.data.language import documents, text_shards, wordpiece
from kfac_bench.data.language.documents import Document
from kfac_bench.data.language.text_shards import Manifest, TextShard
from kfac_bench.errors import UsageError, printable
from kfac_bench.output import counted
from kfac_bench.whole_files import whole_file

BLOCK_CHARACTERS = 32_000_000
"""Characters of a block, the documents that are in memory at a time.

A block becomes one shard. Random second segments come from other documents of the block."""
VOCABULARY_CHARACTERS = 500_000_000
"""A vocabulary is trained on this many characters from the beginning of the text."""
NAMED = 20
"""Number of empty documents that are named one by one; further ones are only counted."""

Sentence = Sequence[int]
"""Token ids of a sentence; at least one."""

SHORT = 0.1
"""Share of the examples that are shorter than possible: fine-tuning meets short texts, too."""

Say = Callable[[str], None]
"""Function that shows a line to the user."""


@dataclass(frozen=True)
class SentencePair:
    """Token ids of two segments, without [CLS] and [SEP]."""

    first: list[int]
    second: list[int]
    random: bool
    """True if the second segment is from another document."""


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
    """Write examples of each length into `root`, in the layout of `text_shards`.

    Equal arguments give equal files.

    Args:
        source: Returns the documents, the same ones at each call. Documents without text are left
            out.
        root: Folder to write.
        vocabulary_file: The vocabulary; by default the one in `root`, or else a new one.
        vocabulary_size: Tokens of a new vocabulary.
        sequence_lengths: Lengths of the examples, in tokens.
        eval_share: Share of the documents for evaluation, chosen by a hash of their text. It does
            not count where the corpus says which documents are held out.
        seed: Seed of the pairs and their lengths.
        about: Where the text comes from, for the manifest.
        say: Shows the progress and the documents that are left out.

    Raises:
        UsageError: An argument is out of range, `root` has such text already, or the documents
            give no example for training or for evaluation.
    """
    if not 0 < eval_share < 1:
        raise UsageError(f"--eval-share {eval_share:g} must be above 0 and below 1")
    if bad := [n for n in sequence_lengths if not 8 <= n <= 65_000]:
        raise UsageError(f"--sequence-length {bad[0]} must be at least 8 and at most 65000")
    if old := sorted(set(sequence_lengths) & set(text_shards.lengths(root))):
        raise UsageError(f"{root} has text of length {old[0]} already. Choose another folder")
    root.mkdir(parents=True, exist_ok=True)
    vocabulary = vocabulary_of(source, root, vocabulary_file, vocabulary_size, say)
    writers = [_Writer(root, vocabulary, n, seed) for n in sorted(set(sequence_lengths))]
    skipped: list[Unreadable] = []
    count = 0
    tokenizer = wordpiece.tokenizer(vocabulary)
    for number, block in enumerate(_blocks(source(), skipped)):
        count += len(block)
        for split in text_shards.SPLITS:
            chosen = [d for d in block if is_held_out(d, eval_share) == (split == "eval")]
            tokens = [t for d in chosen if (t := _tokens(tokenizer, d))]
            # All lengths use the same tokens, so each document is tokenized once.
            for writer in writers:
                writer.add(split, number, tokens)
        made = ", ".join(f"{w.count} examples of {w.length}" for w in writers)
        say(f"{count} documents, {made}")
    _say_skipped(skipped, say)
    if not count:
        raise _no_text(skipped)
    origin = {"source": about, "documents": count, "empty_documents": len(skipped), "seed": seed}
    for writer in writers:
        writer.finish(origin)


def vocabulary_of(
    source: Callable[[], Iterator[Document]],
    root: Path,
    file: Path | None,
    size: int,
    say: Say = lambda text: None,
) -> wordpiece.Vocabulary:
    """Return the vocabulary to use, and write it into `root` if it is not there."""
    final = root / text_shards.VOCABULARY
    if file is not None:
        given = wordpiece.read(file)
        if final.exists() and wordpiece.read(final) != given:
            raise UsageError(f"{final} is another vocabulary than {file}. Choose another folder")
        if not final.exists():
            # A file that is cut by a full disk would be the vocabulary of the next attempt.
            with whole_file(final) as temporary:
                shutil.copyfile(file, temporary)
        return given
    if final.exists():
        found = wordpiece.read(final)
        say(f"using the vocabulary {final} of {len(found):,} tokens")
        return found
    texts, characters, skipped = list[str](), 0, list[Unreadable]()
    for document in source():
        texts.append(document.text)
        if not document.text.strip():
            skipped.append(Unreadable(document.where, document.fault))
        characters += len(document.text)
        if characters > VOCABULARY_CHARACTERS:
            break
    if len(skipped) == len(texts):
        raise _no_text(skipped)
    say(f"training a vocabulary on {characters:,} characters")
    made = wordpiece.train(texts, size)
    wordpiece.write(made, final)
    return made


def _no_text(skipped: list[Unreadable]) -> UsageError:
    return UsageError(f"there is no document with text: nothing was prepared{left_out(skipped)}")


def _blocks(source: Iterator[Document], skipped: list[Unreadable]) -> Iterator[list[Document]]:
    """Yield blocks of documents with text. Add the other documents to `skipped`."""
    block, characters = list[Document](), 0
    for document in source:
        if not document.text.strip():
            skipped.append(Unreadable(document.where, document.fault))
            continue
        block.append(document)
        characters += len(document.text)
        if characters >= BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def is_held_out(document: Document, share: float) -> bool:
    """Return whether a document is for evaluation: the corpus or a hash of the text decides."""
    if document.held_out is not None:
        return document.held_out
    digest = hashlib.sha256(document.text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _tokens(tokenizer: Any, document: Document) -> list[list[int]]:
    """Return the token ids of each sentence that has tokens."""
    encoded = tokenizer.encode_batch(documents.sentences(document.text), add_special_tokens=False)
    return [sentence.ids for sentence in encoded if sentence.ids]


def _say_skipped(skipped: list[Unreadable], say: Say) -> None:
    if skipped:
        say(f"left out: {counted(len(skipped), 'empty document')}")
        for document in skipped[:NAMED]:
            say(printable(f"{document.path}: {document.reason}"))
        if len(skipped) > NAMED:
            say(f"and {len(skipped) - NAMED} more")


class _Writer:
    """Writes the shards of one sequence length."""

    def __init__(
        self, root: Path, vocabulary: wordpiece.Vocabulary, length: int, seed: int
    ) -> None:
        self.length, self.count = length, 0
        self._root, self._vocabulary, self._seed = root, vocabulary, seed
        self._cls, self._sep = (vocabulary.special(t) for t in ("[CLS]", "[SEP]"))
        self._shards: dict[str, list[TextShard]] = {split: [] for split in text_shards.SPLITS}

    def add(self, split: str, block: int, tokens: Sequence[Sequence[Sequence[int]]]) -> None:
        """Write a shard of the pairs that the documents of a block give, if they give any."""
        # Each block has its own random numbers, so blocks do not depend on each other.
        generator = np.random.default_rng([self._seed, self.length, block, split == "eval"])
        rows = [self._row(pair) for pair in pairs(tokens, self.length - 3, generator)]
        if not rows:
            return
        name = f"text-{self.length}-{split}-{len(self._shards[split]):05d}.npy"
        with whole_file(self._root / name) as temporary:
            with temporary.open("wb") as file:
                np.save(file, np.stack(rows), allow_pickle=False)
            digest = text_shards.sha256(temporary)
        self._shards[split].append(TextShard(name, len(rows), digest))
        self.count += len(rows)

    def _row(self, pair: SentencePair) -> NDArray[np.unsignedinteger[Any]]:
        """Return a row of a shard; see `text_shards` for its columns."""
        first = [self._cls, *pair.first, self._sep]
        ids = list(chain(first, pair.second, [self._sep]))
        row = np.zeros(text_shards.HEADER + self.length, text_shards.dtype(len(self._vocabulary)))
        row[: text_shards.HEADER] = pair.random, len(first), len(ids)
        row[text_shards.HEADER : text_shards.HEADER + len(ids)] = ids
        return row

    def finish(self, about: dict[str, Any]) -> None:
        """Write the manifest. Raise UsageError if a split has no example."""
        for split, made in self._shards.items():
            if not made:
                raise UsageError(
                    f"no example of length {self.length} for {split}. Add documents, or change "
                    "--eval-share"
                )
        splits = {split: tuple(made) for split, made in self._shards.items()}
        vocabulary = self._root / text_shards.VOCABULARY
        text_shards.write(
            self._root,
            Manifest(
                self.length, len(self._vocabulary), text_shards.sha256(vocabulary), splits, about
            ),
        )


# ---- pairs of segments, as in BERT (Devlin et al. 2019, appendix A.2): the second segment
# ---- follows the first, or comes from another document


def pairs(
    documents: Sequence[Sequence[Sentence]], length: int, generator: np.random.Generator
) -> Iterator[SentencePair]:
    """Yield pairs of at most `length` tokens in all, until each document is used up, in order.

    Half of the pairs take the second segment from another document. So do pairs for which only one
    sentence of the document is left. The unused sentences then begin the next pair. With a single
    document, all second segments follow the first.
    """
    for number, document in enumerate(documents):
        position = 0
        while position < len(document):
            short = generator.random() < SHORT
            target = int(generator.integers(2, length + 1)) if short else length
            end = _fill(document, position, target)
            pair, position = _pair(documents, number, position, end, target, generator)
            if pair is not None:
                yield _cut(pair, length, generator)


def _fill(document: Sequence[Sentence], position: int, target: int) -> int:
    """Return the end of the sentences from `position` on that have at least `target` tokens."""
    tokens, end = 0, position
    while end < len(document) and tokens < target:
        tokens += len(document[end])
        end += 1
    return end


def _pair(
    documents: Sequence[Sequence[Sentence]],
    number: int,
    position: int,
    end: int,
    target: int,
    generator: np.random.Generator,
) -> tuple[SentencePair | None, int]:
    """Return a pair of the sentences from `position` to `end`, and where the next pair begins."""
    document = documents[number]
    count = end - position
    cut = position + (1 if count < 3 else int(generator.integers(1, count)))
    first = _joined(document[position:cut])
    wants_random = count == 1 or generator.random() < 0.5
    if not wants_random or len(documents) == 1:
        return (SentencePair(first, _joined(document[cut:end]), False) if cut < end else None), end
    other = int(generator.integers(len(documents) - 1))
    # Skip the document itself.
    elsewhere = documents[other + (other >= number)]
    start = int(generator.integers(len(elsewhere)))
    wanted = max(1, target - len(first))
    second = _joined(elsewhere[start : _fill(elsewhere, start, wanted)])
    return SentencePair(first, second, True), cut


def _cut(pair: SentencePair, length: int, generator: np.random.Generator) -> SentencePair:
    """Cut a pair to `length` tokens: remove tokens from both ends of the longer segment."""
    first, second = pair.first, pair.second
    over = len(first) + len(second) - length
    while over > 0:
        longer = first if len(first) > len(second) else second
        # Cut the longer segment only until both have the same length.
        off = min(over, max(1, abs(len(first) - len(second))))
        front = int(generator.integers(off + 1))
        longer[:] = longer[front : len(longer) - (off - front)]
        over -= off
    return SentencePair(first, second, pair.random)


def _joined(sentences: Sequence[Sentence]) -> list[int]:
    return [token for sentence in sentences for token in sentence]
