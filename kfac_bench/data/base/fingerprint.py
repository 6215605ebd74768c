"""The fingerprint of a dataset, by which a run that continues notices that its data changed."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from kfac_bench.data.base.dataset import SPLITS, Data

MOST_SIZES = 100_000
"""Files of a split whose sizes are read. On a network disk a size can take a millisecond."""

Fingerprint = Mapping[str, Mapping[str, Any]]
"""By split: the number of examples, and a hash of what identifies them in their order."""


def fingerprint(data: Data) -> dict[str, dict[str, Any]]:
    """Return the fingerprint of a dataset."""
    result: dict[str, dict[str, Any]] = {}
    for split, examples in zip(SPLITS, (data.train_size, data.eval_size), strict=True):
        digest = hashlib.sha256()
        for part in data.contents(split):
            digest.update(part)
        result[split] = {"examples": examples, "sha256": digest.hexdigest()}
    return result


def difference(before: Fingerprint, now: Fingerprint) -> str | None:
    """Return how two fingerprints differ, in words, or None if they are equal."""
    parts = []
    for split in SPLITS:
        old, new = before.get(split), now.get(split)
        if old == new:
            continue
        if not isinstance(old, Mapping) or not isinstance(new, Mapping):
            parts.append(f"only one of the two has a split {split}")
            continue
        count, now_count = old.get("examples"), new.get("examples")
        if count != now_count:
            parts.append(f"{split} has {now_count} examples, before {count}")
        else:
            parts.append(
                f"{split} has {count} examples as before, but names, sizes or labels changed"
            )
    return "; ".join(parts) or None


def of_files(paths: Sequence[str | Path], root: Path) -> Iterator[bytes]:
    """Yield names below `root` of all files, and the sizes of at most MOST_SIZES of them.

    The files with a size are evenly spread. A missing file has the size -1.
    """
    every = -(-len(paths) // MOST_SIZES) or 1
    for number, path in enumerate(paths):
        name = os.fsencode(os.path.relpath(path, root))
        yield name + b"\0" + (str(_size(path)).encode() if number % every == 0 else b"") + b"\n"


def of_tensors(tensors: Sequence[Tensor]) -> Iterator[bytes]:
    """Yield the types, the shapes and the integers of tensors in memory.

    Floating-point numbers are left out. The program computed them from its own data, and their last
    bits can differ between machines.
    """
    for x in tensors:
        yield f"{x.dtype} {list(x.shape)}\n".encode()
        if not x.is_floating_point():
            yield x.contiguous().numpy().tobytes()


def _size(path: str | Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
