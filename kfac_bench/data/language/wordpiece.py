"""BERT's WordPiece vocabularies: read from vocab.txt, trained from text, and put to use."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfac_bench.errors import UsageError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD = 0
"""The id of [PAD]: the first of every vocabulary."""
MAX_SIZE = 2**20
ALPHABET = 1000
"""Characters in a trained vocabulary at most; words with rarer ones are [UNK]."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id; `##x` continues a word. All of :data:`SPECIAL` are there, [PAD] first."""

    tokens: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def special(self, token: str) -> int:
        """The id of one of :data:`SPECIAL`."""
        return self.tokens.index(token)

    @property
    def lowercase(self) -> bool:
        """Whether it was made of lower-case text: no token but [...] has a capital."""
        return all(t == t.lower() for t in self.tokens if not t.startswith("["))


def read(path: Path) -> Vocabulary:
    """A vocab.txt, one token a line. Raises UsageError where it is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: no vocabulary can be read ({_first_line(error)})") from None
    tokens = tuple(text.removesuffix("\n").split("\n"))
    if missing := [t for t in SPECIAL if t not in tokens]:
        raise UsageError(f"{path}: a vocabulary of BERT needs the token {missing[0]}")
    if tokens[PAD] != SPECIAL[PAD]:
        raise UsageError(f"{path}: the first token must be [PAD], not {tokens[PAD][:20]!r}")
    if len(set(tokens)) != len(tokens):
        twice = next(t for t, count in Counter(tokens).items() if count > 1)
        raise UsageError(f"{path}: the token {twice[:20]!r} is there more than once")
    if len(tokens) > MAX_SIZE:
        raise UsageError(f"{path}: {len(tokens)} tokens; at most {MAX_SIZE} are taken")
    return Vocabulary(tokens)


def write(vocabulary: Vocabulary, path: Path) -> None:
    """As :func:`read` reads it."""
    path.write_text("\n".join(vocabulary.tokens) + "\n", encoding="utf-8")


def train(texts: Iterable[str], size: int, lowercase: bool = True) -> Vocabulary:
    """A vocabulary of at most `size` tokens; the same for the same texts.

    The trainer of tokenizers breaks ties by the order in which it met characters, which is
    random; so they are given to it in an order of ours, those most frequent first chosen.
    """
    tokenizers = package()
    held = list(texts)
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    counts: Counter[str] = Counter()
    for text in held:
        counts.update(normalizer.normalize_str(text))
    by_count = sorted(counts, key=lambda c: (-counts[c], c))
    alphabet = sorted([c for c in by_count if not c.isspace()][:ALPHABET])
    inside = ["##" + c for c in alphabet if not _is_punctuation(c)]
    first = [*SPECIAL, *alphabet, *inside]
    if size < len(first):
        raise UsageError(
            f"a vocabulary of {size} tokens is too small: the characters of this text take "
            f"{len(first)}"
        )
    tokenizer = _empty(tokenizers, lowercase, {"[UNK]": 0})
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=first, min_frequency=2, show_progress=False,
        limit_alphabet=len(alphabet),
    )  # fmt: skip
    tokenizer.train_from_iterator(held, trainer)
    ids: dict[str, int] = tokenizer.get_vocab()
    return Vocabulary(tuple(sorted(ids, key=ids.__getitem__)))


def tokenizer(vocabulary: Vocabulary) -> Any:
    """A `tokenizers.Tokenizer` that adds no [CLS] or [SEP] and gives offsets in characters."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    return _empty(package(), vocabulary.lowercase, ids)


def package() -> Any:
    """The package tokenizers, or one line that says how to install it."""
    try:
        import tokenizers
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise UsageError(
            "text is cut into tokens by the package tokenizers: pip install 'kfac-bench[language]'"
        ) from None
    return tokenizers


def _empty(tokenizers: Any, lowercase: bool, ids: dict[str, int]) -> Any:
    model = tokenizers.models.WordPiece(ids, unk_token="[UNK]")  # noqa: S106
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return made


def _is_punctuation(c: str) -> bool:
    """As BERT sees it: a word of its own."""
    return unicodedata.category(c).startswith("P") or (c.isascii() and not c.isalnum())


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
