"""Prepared text on disk: shards of examples as plain arrays, and a manifest that vouches for them.

`<root>/vocab.txt`; and for each length L `text-<L>.json`, the manifest, written last, and
`text-<L>-<split>-<number>.npy`, uint16 or uint32 [N, 3 + L]: whether the second stretch is random,
where it begins, how many tokens there are, and their ids: [CLS] first [SEP] second [SEP], then 0.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kfac_bench.data.language import wordpiece
from kfac_bench.errors import UsageError

FORMAT = "kfac_bench text 1"
VOCABULARY = "vocab.txt"
LAYOUT = f"{VOCABULARY}, text-<length>.json and text-<length>-<split>-<number>.npy"
SPLITS = ("train", "eval")
HEADER = 3
"""Columns before the ids."""

Array = np.ndarray[Any, np.dtype[Any]]
Fault = tuple[Path, str]


@dataclass(frozen=True)
class Shard:
    """One file of examples."""

    file: str
    examples: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What belongs to a set of examples of one length."""

    sequence_length: int
    vocabulary_size: int
    vocabulary_sha256: str
    splits: Mapping[str, tuple[Shard, ...]]
    about: Mapping[str, Any]
    """Where it comes from, for people."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the shards."""
        return dtype(self.vocabulary_size)

    def examples(self, split: str) -> int:
        """In all shards of a split."""
        return sum(shard.examples for shard in self.splits[split])


def dtype(vocabulary_size: int) -> np.dtype[Any]:
    """The smallest that holds every id."""
    return np.dtype(np.uint16 if vocabulary_size <= 2**16 else np.uint32)


def path(root: Path, sequence_length: int) -> Path:
    """Of the manifest."""
    return root / f"text-{sequence_length}.json"


def lengths(root: Path) -> list[int]:
    """Those that are prepared."""
    found = (re.fullmatch(r"text-(\d{1,6})\.json", p.name) for p in root.glob("text-*.json"))
    return sorted(int(m[1]) for m in found if m)


def write(root: Path, manifest: Manifest) -> None:
    """All at once: a reader sees none or a whole one."""
    final = path(root, manifest.sequence_length)
    partial = final.with_suffix(".partial")
    partial.write_text(json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1) + "\n")
    partial.rename(final)


def read(root: Path, sequence_length: int) -> tuple[Manifest, wordpiece.Vocabulary]:
    """The manifest and the vocabulary that it is about; UsageError for forged or missing ones."""
    file = path(root, sequence_length)
    if not file.is_file():
        there = ", ".join(map(str, lengths(root))) or "none"
        raise UsageError(
            f"no text of sequence length {sequence_length} in {root} (prepared: {there}): see "
            "kfac-data prepare --help, or set data.sequence_length"
        )
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        manifest = _checked(found)
        if manifest.sequence_length != sequence_length:
            raise ValueError(f"its length is {manifest.sequence_length}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
        raise UsageError(f"{file}: no manifest of prepared text ({said})") from None
    vocabulary = wordpiece.read(root / VOCABULARY)
    if sha256(root / VOCABULARY) != manifest.vocabulary_sha256:
        raise UsageError(f"{root / VOCABULARY}: not the vocabulary that {file.name} was made with")
    if len(vocabulary) != manifest.vocabulary_size:
        raise UsageError(
            f"{file}: it says {manifest.vocabulary_size} tokens, {VOCABULARY} has {len(vocabulary)}"
        )
    return manifest, vocabulary


def _checked(found: Any) -> Manifest:
    """Of the right types and in range, or ValueError and its like."""
    if found["format"] != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    # Checked first: the names of the shards are matched against a pattern that contains it.
    length = _count(found["sequence_length"], 8)
    splits = {
        split: tuple(_shard(shard, length, split) for shard in found["splits"][split])
        for split in SPLITS
    }
    names = [shard.file for shards in splits.values() for shard in shards]
    if len(set(names)) != len(names):
        raise ValueError("a shard is named twice")
    if not all(splits.values()):
        raise ValueError("a split has no shard")
    return Manifest(
        length,
        _count(found["vocabulary_size"], len(wordpiece.SPECIAL)),
        str(found["vocabulary_sha256"]),
        splits,
        dict(found["about"]),
    )


def _shard(found: Any, length: int, split: str) -> Shard:
    name = found["file"]
    if not re.fullmatch(rf"text-{length}-{split}-\d{{5,9}}\.npy", name):
        raise ValueError(f"{name!r} is no name of a shard")
    return Shard(name, _count(found["examples"], 1), str(found["sha256"]))


def _count(x: Any, least: int) -> int:
    if not isinstance(x, int) or isinstance(x, bool) or not least <= x < 2**31:
        raise ValueError(f"{x!r} is no number from {least} on")
    return x


def open_shard(root: Path, manifest: Manifest, shard: Shard) -> Array:
    """Its examples, mapped into memory. Raises UsageError if it is not what the manifest says."""
    file = root / shard.file
    try:
        rows: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises nearly anything for a damaged header
        said = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
        raise UsageError(f"{file}: a damaged shard ({said})") from None
    shape = (shard.examples, HEADER + manifest.sequence_length)
    if rows.shape != shape or rows.dtype != manifest.dtype:
        raise UsageError(
            f"{file}: {rows.dtype} {list(rows.shape)}, the manifest says {manifest.dtype} "
            f"{list(shape)}"
        )
    return rows


def faults(root: Path, manifest: Manifest) -> list[Fault]:
    """Shards that are not there, damaged, or have examples that are none; reads everything."""
    found: list[Fault] = []
    for shard in (s for split in SPLITS for s in manifest.splits[split]):
        file = root / shard.file
        try:
            rows = open_shard(root, manifest, shard)
        except UsageError as error:
            found.append((file, str(error).removeprefix(f"{file}: ")))
            continue
        if sha256(file) != shard.sha256:
            found.append((file, "its SHA-256 is not the manifest's"))
        elif bad := int((~_well_formed(rows, manifest)).sum()):
            found.append((file, f"{bad} of its rows are no examples"))
    return found


def well_formed(row: Array, manifest: Manifest) -> bool:
    """Whether one row [3 + L] is an example that a model can read."""
    return bool(_well_formed(row[None], manifest)[0])


def _well_formed(rows: Array, manifest: Manifest) -> Array:
    random, second, tokens = rows[:, :HEADER].astype(np.int64).T
    good: Array = (random <= 1) & (second >= 3) & (tokens >= second + 2)
    good &= (tokens <= manifest.sequence_length) & (
        rows[:, HEADER:].max(1) < manifest.vocabulary_size
    )
    return good


def sha256(file: Path) -> str:
    """Of a file's bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
