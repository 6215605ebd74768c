"""Checkpoints are found, verified and read; what they hold is data, never code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kfac_bench.errors import UsageError
from kfac_bench.training.checkpoint import folder
from kfac_bench.training.checkpoint.folder import MANIFEST


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: rank 0's part and all ranks' shards, in rank order."""

    path: Path
    step: int
    shards: list[dict[str, Any]]


def load(path: Path) -> Checkpoint:
    """Read and verify one checkpoint directory. Raises :class:`UsageError` naming what is bad."""
    try:
        manifest = folder.manifest(path)
        step, files = int(manifest["step"]), dict(manifest["sha256"])
        world_size = min(int(manifest["world_size"]), len(files) + 1)  # one that is not there
        if world_size < 1:
            raise ValueError("it lists no ranks")
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UsageError(f"{path}: no checkpoint ({MANIFEST}: {error})") from None
    names = [f"rank{rank}.pt" for rank in range(world_size)]
    return Checkpoint(path, step, [_read(path / name, files.get(name)) for name in names])


def _read(file: Path, sha256: object) -> dict[str, Any]:
    try:
        good = file.is_file() and _sha256(file) == sha256
    except OSError as error:  # a disk that fails
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    if not good:
        raise UsageError(f"{file}: damaged (its SHA-256 is not the manifest's)")
    try:
        shard = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that somebody made may raise anything
        said = (str(error).splitlines() or [type(error).__name__])[0][:100]
        raise UsageError(f"{file}: not a checkpoint of ours ({said})") from None
    if not isinstance(shard, dict):
        raise UsageError(f"{file}: not a checkpoint of ours (it holds no dictionary)")
    return shard


def find(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest good checkpoint under a run directory, and a line on each bad one passed over.

    ``path`` may also be one checkpoint, or the ``checkpoints`` folder.
    """
    if (path / MANIFEST).exists():
        return load(path), []
    directory = _directory(path)
    return _first_good(directory, reversed(folder.steps(directory)))


def find_best(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """As :func:`find`: the best good one, by the validation figures in the manifests.

    None if no checkpoint there was of evaluated weights.
    """
    directory = _directory(path)
    return _first_good(directory, folder.best_first(directory))


def _directory(path: Path) -> Path:
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def _first_good(directory: Path, steps: Iterable[int]) -> tuple[Checkpoint | None, list[str]]:
    bad: list[str] = []
    for step in steps:
        try:
            return load(folder.path_of(directory, step)), bad
        except UsageError as error:
            bad.append(str(error))
    return None, bad


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
