"""How near an answer comes to a true one: exact match and F1 as SQuAD v1.1 defines them."""

import re
import string
from collections import Counter

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """What counts of an answer: lower case, without punctuation and the articles a, an, the."""
    plain = text.lower().translate(_PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def exact_match(answer: str, truth: str) -> float:
    """1 if the same words in the same order are left of both, else 0."""
    return float(words(answer) == words(truth))


def f1(answer: str, truth: str) -> float:
    """Harmonic mean of precision and recall of the words, counted as often as they are there."""
    ours, theirs = Counter(words(answer)), Counter(words(truth))
    same = (ours & theirs).total()
    return 2 * same / (ours.total() + theirs.total()) if same else 0.0
