"""Pairs of text segments: the second segment follows the first, or comes from another document.

They are the examples of next-sentence prediction in BERT (Devlin et al. 2019, appendix A.2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Sentence = Sequence[int]
"""Token ids of a sentence; at least one."""

SHORT = 0.1
"""Share of the examples that are shorter than possible: fine-tuning meets short texts, too."""


@dataclass(frozen=True)
class SentencePair:
    """Token ids of two segments, without [CLS] and [SEP]."""

    first: list[int]
    second: list[int]
    random: bool
    """Whether the second segment is from another document."""


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
