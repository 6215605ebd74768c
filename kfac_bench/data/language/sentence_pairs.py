"""Two stretches of text per example: the second follows the first, or comes from elsewhere.

Next-sentence prediction as in BERT (Devlin et al. 2019, appendix A.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Sentence = Sequence[int]
"""Ids of its tokens; at least one."""

SHORT = 0.1
"""Of the examples, those shorter than they could be: fine-tuning on short ones is no surprise."""


@dataclass(frozen=True)
class Pair:
    """Ids of both stretches, without [CLS] and [SEP]; whether the second does not follow."""

    first: list[int]
    second: list[int]
    random: bool


def pairs(
    documents: Sequence[Sequence[Sentence]], length: int, generator: np.random.Generator
) -> Iterator[Pair]:
    """Pairs of at most `length` tokens in all; each document is used up once, in order.

    Half of the pairs, and those where a document has but one sentence left, take the second
    stretch from another document, and go on in the first where they left off. Where there is no
    other document all second stretches follow.
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
    """Where the sentences from `position` on have `target` tokens, or the document ends."""
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
) -> tuple[Pair | None, int]:
    """A pair of the sentences from `position` to `end`, and where the next one begins."""
    document = documents[number]
    count = end - position
    cut = position + (1 if count < 3 else int(generator.integers(1, count)))
    first = _joined(document[position:cut])
    wants_random = count == 1 or generator.random() < 0.5
    if not wants_random or len(documents) == 1:
        return (Pair(first, _joined(document[cut:end]), False) if cut < end else None), end
    other = int(generator.integers(len(documents) - 1))
    elsewhere = documents[other + (other >= number)]
    start = int(generator.integers(len(elsewhere)))
    wanted = max(1, target - len(first))
    second = _joined(elsewhere[start : _fill(elsewhere, start, wanted)])
    return Pair(first, second, True), cut


def _cut(pair: Pair, length: int, generator: np.random.Generator) -> Pair:
    """At most `length` tokens: off the longer stretch, at either end."""
    first, second = pair.first, pair.second
    over = len(first) + len(second) - length
    while over > 0:
        longer = first if len(first) > len(second) else second
        off = min(over, max(1, abs(len(first) - len(second))))
        front = int(generator.integers(off + 1))
        longer[:] = longer[front : len(longer) - (off - front)]
        over -= off
    return Pair(first, second, pair.random)


def _joined(sentences: Sequence[Sentence]) -> list[int]:
    return [token for sentence in sentences for token in sentence]
