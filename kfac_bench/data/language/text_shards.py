"""Prepared text on disk: shards of examples as plain arrays, and a manifest with their hashes.

`<root>/vocab.txt` is the vocabulary. For each sequence length L there are:

* `text-<L>.json`, the manifest, written last.
* `text-<L>-<split>-<number>.npy`, uint16 or uint32 [N, 3 + L]. Each row is an example: whether the
  second segment is random, where it begins, the number of tokens, and the token ids [CLS] first
  segment [SEP] second segment [SEP], padded with 0.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfac_bench.data.base.files import Unreadable, regular
from kfac_bench.data.language import wordpiece
from kfac_bench.errors import UsageError
from kfac_bench.whole_files import whole_file

FORMAT = "kfac_bench text 1"
VOCABULARY = "vocab.txt"
SPLITS = ("train", "eval")
HEADER = 3
"""Columns before the token ids."""

Rows = NDArray[np.unsignedinteger[Any]]
"""Examples [N, 3 + L]."""


@dataclass(frozen=True)
class TextShard:
    """One file of examples, as the manifest describes it."""

    file: str
    examples: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The description of all examples of one length."""

    sequence_length: int
    vocabulary_size: int
    vocabulary_sha256: str
    splits: Mapping[str, tuple[TextShard, ...]]
    about: Mapping[str, Any]
    """The origin of the text, for people."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the token ids in the shards."""
        return dtype(self.vocabulary_size)

    def examples(self, split: str) -> int:
        """Return the number of examples in all shards of a split."""
        return sum(shard.examples for shard in self.splits[split])


def dtype(vocabulary_size: int) -> np.dtype[Any]:
    """Return the smallest type that can store every token id."""
    return np.dtype(np.uint16 if vocabulary_size <= 2**16 else np.uint32)


def path(root: Path, sequence_length: int) -> Path:
    """Return the path of the manifest."""
    return root / f"text-{sequence_length}.json"


def lengths(root: Path) -> list[int]:
    """Return the sequence lengths of the text in a folder."""
    found = (re.fullmatch(r"text-(\d{1,6})\.json", p.name) for p in root.glob("text-*.json"))
    return sorted(int(m[1]) for m in found if m)


def write(root: Path, manifest: Manifest) -> None:
    """Write the manifest as a whole."""
    with whole_file(path(root, manifest.sequence_length)) as temporary:
        temporary.write_text(json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1) + "\n")


def read(root: Path, sequence_length: int) -> tuple[Manifest, wordpiece.Vocabulary]:
    """Return the manifest of a length, and its vocabulary; raise UsageError if one is invalid."""
    file = path(root, sequence_length)
    if not file.is_file():
        there = ", ".join(map(str, lengths(root))) or "none"
        raise UsageError(
            f"no text of sequence length {sequence_length} in {root} (prepared: {there}). Set "
            "data.sequence_length, or see kfac-data prepare --help"
        )
    try:
        manifest = _checked(json.loads(file.read_text(encoding="utf-8")))
        if manifest.sequence_length != sequence_length:
            raise ValueError(f"its length is {manifest.sequence_length}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = Unreadable.because(file, error).reason[:100]
        raise UsageError(f"{file}: not a manifest of prepared text ({reason})") from None
    vocabulary = wordpiece.read(root / VOCABULARY)
    if sha256(root / VOCABULARY) != manifest.vocabulary_sha256:
        raise UsageError(f"{root / VOCABULARY}: {file.name} was made with another vocabulary")
    if len(vocabulary) != manifest.vocabulary_size:
        raise UsageError(
            f"{file}: it says {manifest.vocabulary_size} tokens, {VOCABULARY} has {len(vocabulary)}"
        )
    return manifest, vocabulary


def _checked(content: Any) -> Manifest:
    """Check the types and ranges of a manifest's content; raise ValueError and similar errors."""
    if content["format"] != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    # Checked first: the names of the shards are matched against a pattern that contains it.
    length = _count(content["sequence_length"], 8)
    splits = {
        split: tuple(_shard(shard, length, split) for shard in content["splits"][split])
        for split in SPLITS
    }
    names = [shard.file for shards in splits.values() for shard in shards]
    if len(set(names)) != len(names):
        raise ValueError("a shard is named twice")
    if not all(splits.values()):
        raise ValueError("a split has no shard")
    return Manifest(
        length,
        _count(content["vocabulary_size"], len(wordpiece.SPECIAL)),
        str(content["vocabulary_sha256"]),
        splits,
        dict(content["about"]),
    )


def _shard(entry: Any, length: int, split: str) -> TextShard:
    name = entry["file"]
    # The pattern also keeps a forged name from leading out of the folder.
    if not re.fullmatch(rf"text-{length}-{split}-\d{{5,9}}\.npy", name):
        raise ValueError(f"{name!r} is not the name of a shard")
    return TextShard(name, _count(entry["examples"], 1), str(entry["sha256"]))


def _count(x: Any, least: int) -> int:
    if not isinstance(x, int) or isinstance(x, bool) or not least <= x < 2**31:
        raise ValueError(f"{x!r} is not a number of at least {least}")
    return x


def open_shard(root: Path, manifest: Manifest, shard: TextShard) -> Rows:
    """Return the examples of a shard, mapped into memory.

    Raises:
        UsageError: The shard is damaged, or differs from its description in the manifest.
    """
    file = root / shard.file
    try:
        # Not np.load(), which also opens archives of several arrays.
        rows: Rows = np.lib.format.open_memmap(regular(file), mode="r")
    # numpy raises exceptions of many types for a damaged header.
    except Exception as error:
        reason = Unreadable.because(file, error).reason[:100]
        raise UsageError(f"{file}: a damaged shard ({reason})") from None
    shape = (shard.examples, HEADER + manifest.sequence_length)
    if rows.shape != shape or rows.dtype != manifest.dtype:
        raise UsageError(
            f"{file}: {rows.dtype} {list(rows.shape)}, the manifest says {manifest.dtype} "
            f"{list(shape)}"
        )
    return rows


def faults(root: Path, manifest: Manifest) -> list[Unreadable]:
    """Read all shards. Return those that are missing, damaged, or contain invalid examples."""
    found: list[Unreadable] = []
    for shard in (s for split in SPLITS for s in manifest.splits[split]):
        file = root / shard.file
        try:
            rows = open_shard(root, manifest, shard)
        except UsageError as error:
            found.append(Unreadable(str(file), str(error).removeprefix(f"{file}: ")))
            continue
        if sha256(file) != shard.sha256:
            found.append(Unreadable(str(file), "its SHA-256 is not the one in the manifest"))
        elif bad := int((~_well_formed(rows, manifest)).sum()):
            found.append(Unreadable(str(file), f"{bad} of its rows are not valid examples"))
    return found


def well_formed(row: Rows, manifest: Manifest) -> bool:
    """Return whether one row [3 + L] is a valid example."""
    return bool(_well_formed(row[None], manifest)[0])


def _well_formed(rows: Rows, manifest: Manifest) -> NDArray[np.bool_]:
    random, second, tokens = rows[:, :HEADER].astype(np.int64).T
    # The shortest example is [CLS] token [SEP] token [SEP]: the second segment begins at 3.
    good: NDArray[np.bool_] = (random <= 1) & (second >= 3) & (tokens >= second + 2)
    good &= tokens <= manifest.sequence_length
    good &= rows[:, HEADER:].max(1) < manifest.vocabulary_size
    return good


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with regular(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
