"""BERT's WordPiece vocabularies: reading vocab.txt, training on text, and tokenizing."""

import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfac_bench.data.base.files import regular
from kfac_bench.errors import MissingPackageError, UsageError, first_line
from kfac_bench.whole_files import whole_file

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD = 0
"""The id of [PAD], which is the first token of every vocabulary."""
MAX_SIZE = 2**20
"""Largest number of tokens of a vocabulary."""
ALPHABET = 1000
"""Largest number of characters in a new vocabulary. Words with rarer characters are [UNK]."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id. `##x` continues a word. The tokens contain SPECIAL, with [PAD] first."""

    tokens: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def special(self, token: str) -> int:
        """Return the id of a token of SPECIAL."""
        return self.tokens.index(token)

    @property
    def lowercase(self) -> bool:
        """True if the tokenizer must lowercase text: no token except [...] has a capital letter."""
        return all(t == t.lower() for t in self.tokens if not t.startswith("["))


def read(path: Path) -> Vocabulary:
    """Read a vocab.txt with one token per line. Raise UsageError if it is invalid."""
    try:
        text = regular(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: the vocabulary cannot be read ({first_line(error)})") from None
    tokens = tuple(text.removesuffix("\n").split("\n"))
    if missing := [t for t in SPECIAL if t not in tokens]:
        raise UsageError(f"{path}: the token {missing[0]}, which BERT needs, is missing")
    if tokens[PAD] != SPECIAL[PAD]:
        raise UsageError(f"{path}: the first token must be [PAD], not {tokens[PAD][:20]!r}")
    if len(set(tokens)) != len(tokens):
        twice = next(t for t, count in Counter(tokens).items() if count > 1)
        raise UsageError(f"{path}: the token {twice[:20]!r} occurs more than once")
    if len(tokens) > MAX_SIZE:
        raise UsageError(
            f"{path}: {len(tokens)} tokens are too many. At most {MAX_SIZE} are allowed"
        )
    return Vocabulary(tokens)


def write(vocabulary: Vocabulary, path: Path) -> None:
    """Write a vocab.txt as a whole, as `read` reads it."""
    with whole_file(path) as temporary:
        temporary.write_text("\n".join(vocabulary.tokens) + "\n", encoding="utf-8")


MOST_TOKENS = 1 << 22
"""The trainer reserves memory for all tokens, and takes no larger number than 64 bits hold."""


def train(texts: Iterable[str], size: int) -> Vocabulary:
    """Train a vocabulary of at most `size` tokens, in lower case.

    Equal texts give equal vocabularies.

    Raises:
        UsageError: `size` is smaller than the number of characters in the texts.
    """
    # The trainer breaks ties by the order in which it met the characters, and that order is random.
    # So it gets the most frequent characters as "special tokens", in sorted order.
    tokenizers = package()
    held = list(texts)
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    counts: Counter[str] = Counter()
    for text in held:
        counts.update(normalizer.normalize_str(text))
    by_count = sorted(counts, key=lambda c: (-counts[c], c))
    alphabet = sorted([c for c in by_count if not c.isspace()][:ALPHABET])
    inside = ["##" + c for c in alphabet if not _is_punctuation(c)]
    first = [*SPECIAL, *alphabet, *inside]
    if size < len(first):
        raise UsageError(
            f"a vocabulary of {size} tokens is too small: the characters of this text need "
            f"{len(first)}"
        )
    tokenizer = _empty(tokenizers, True, {"[UNK]": 0})
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=min(size, MOST_TOKENS), special_tokens=first, min_frequency=2,
        show_progress=False, limit_alphabet=len(alphabet),
    )  # fmt: skip
    tokenizer.train_from_iterator(held, trainer)
    ids: dict[str, int] = tokenizer.get_vocab()
    return Vocabulary(tuple(sorted(ids, key=ids.__getitem__)))


def tokenizer(vocabulary: Vocabulary) -> Any:
    """Return a `tokenizers.Tokenizer` without [CLS] and [SEP], with offsets in characters."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    return _empty(package(), vocabulary.lowercase, ids)


def package() -> Any:
    """Return the package tokenizers; raise UsageError if it is not installed."""
    try:
        import tokenizers
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise MissingPackageError("tokenizers", "text") from None
    return tokenizers


def _empty(tokenizers: Any, lowercase: bool, ids: dict[str, int]) -> Any:
    model = tokenizers.models.WordPiece(ids, unk_token="[UNK]")  # noqa: S106
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return made


def _is_punctuation(c: str) -> bool:
    """Return whether BERT treats the character as punctuation, which is a word of its own."""
    return unicodedata.category(c).startswith("P") or (c.isascii() and not c.isalnum())
