"""Scores of an answer against a true answer: exact match and F1, as SQuAD v1.1 defines them."""

import re
import string
from collections import Counter

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and a, an, the."""
    plain = text.lower().translate(_PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def exact_match(answer: str, truth: str) -> float:
    """Return 1 if both have the same :func:`words` in the same order, else 0."""
    return float(words(answer) == words(truth))


def f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall of the words, repeated words included."""
    ours, theirs = Counter(words(answer)), Counter(words(truth))
    same = (ours & theirs).total()
    return 2 * same / (ours.total() + theirs.total()) if same else 0.0
