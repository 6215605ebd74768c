"""Checkpoints: written apart, hashed, renamed into place; verified when read.

``checkpoints/step-00000120/`` holds ``rank0.pt`` ... (what that rank owns; rank 0 also model and
optimizer) and, written last, ``manifest.json`` with the SHA-256 of each. A directory without
a manifest that fits does not count, so a kill, a full disk or a flipped bit costs steps, not runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kfac_bench.errors import UsageError
from kfac_bench.ranks import Ranks

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: rank 0's part and all ranks' shards, in rank order."""

    path: Path
    step: int
    shards: list[dict[str, Any]]


def save(directory: Path, step: int, shard: dict[str, Any], ranks: Ranks, keep_last: int) -> Path:
    """Write ``shard`` of every rank as one checkpoint; all ranks call it.

    Raises ``OSError`` on every rank if one could not write; older checkpoints are then untouched.
    """
    final = directory / f"step-{step:08d}"
    partial = directory / f".step-{step:08d}.partial"
    try:
        _together(ranks, final, ranks.is_main, lambda: _make_anew(partial))
        _together(
            ranks, final, True, lambda: _write_synced(partial / f"rank{ranks.rank}.pt", shard)
        )
        _together(
            ranks, final, ranks.is_main, lambda: _commit(partial, final, step, ranks.world_size)
        )
    except OSError:
        if ranks.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if ranks.is_main:
        steps = _steps(directory)  # later ones were passed over as damaged: they are void
        kept = [s for s in steps if s <= step][-keep_last:]
        for old in set(steps) - set(kept):
            shutil.rmtree(directory / f"step-{old:08d}", ignore_errors=True)
    ranks.any(False)
    return final


def _together(ranks: Ranks, final: Path, mine: bool, action: Callable[[], None]) -> None:
    """Act if it is ours to do; ``OSError`` on every rank if one failed."""
    error: OSError | None = None
    try:
        if mine:
            action()
    except (OSError, RuntimeError) as caught:  # torch.save reports a full disk as RuntimeError
        error = OSError(f"checkpoint {final}: {caught}")
    if ranks.any(error is not None):
        raise error or OSError(f"checkpoint {final}: another rank could not write its part")


def _make_anew(folder: Path) -> None:
    for left in folder.parent.glob(".step-*.partial"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(parents=True)


def _commit(partial: Path, final: Path, step: int, world_size: int) -> None:
    """Write the manifest and rename the folder into place."""
    files = {p.name: _sha256(p) for p in sorted(partial.glob("rank*.pt"))}
    manifest = {"step": step, "world_size": world_size, "sha256": files}
    with (partial / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _sync_directory(final.parent)


def load(path: Path) -> Checkpoint:
    """Read and verify one checkpoint directory. Raises :class:`UsageError` naming what is bad."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        step, files = int(manifest["step"]), dict(manifest["sha256"])
        names = [f"rank{r}.pt" for r in range(int(manifest["world_size"]))]
        if not names:
            raise ValueError("it lists no ranks")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: no checkpoint ({MANIFEST}: {error})") from None
    shards = []
    for name in names:
        file = path / name
        if not file.is_file() or _sha256(file) != files.get(name):
            raise UsageError(f"{file}: damaged (its SHA-256 is not the manifest's)")
        try:
            shards.append(torch.load(file, map_location="cpu", weights_only=True))
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
            raise UsageError(
                f"{file}: not a checkpoint of ours ({str(error).split(chr(10))[0][:100]})"
            ) from None
    return Checkpoint(path, step, shards)


def find(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest good checkpoint under a run directory, and a line on each bad one passed over.

    ``path`` may also be one checkpoint, or the ``checkpoints`` folder.
    """
    if (path / MANIFEST).exists():
        return load(path), []
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    bad: list[str] = []
    for step in reversed(_steps(folder)):
        try:
            return load(folder / f"step-{step:08d}"), bad
        except UsageError as error:
            bad.append(str(error))
    return None, bad


def _steps(directory: Path) -> list[int]:
    """Steps of the checkpoints in a folder, ascending."""
    names = [p.name for p in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(m[1]) for n in names if (m := re.fullmatch(r"step-(\d+)", n)))


def _write_synced(path: Path, state: dict[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
