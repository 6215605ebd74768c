"""Reading: find, verify and load checkpoints, which hold data and never code."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from kfac_bench.errors import UsageError
from kfac_bench.record.own_files import open_own, refuse_special
from kfac_bench.training.checkpoint import folder
from kfac_bench.training.checkpoint.folder import MANIFEST


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: the shards of all ranks, in the order of ranks."""

    path: Path
    step: int
    shards: list[dict[str, Any]]

    def weights(self) -> dict[str, Tensor]:
        """Return the model's parameters and buffers by name.

        Raises:
            UsageError: If the checkpoint holds no model.
        """
        model = self.shards[0].get("model")
        if not isinstance(model, dict) or not all(
            isinstance(name, str) and isinstance(t, Tensor) for name, t in model.items()
        ):
            raise UsageError(f"{self.path} holds no model; give a checkpoint of kfac-train")
        return model


def load(path: Path) -> Checkpoint:
    """Read and verify one checkpoint folder.

    Raises:
        UsageError: If a file is missing or damaged. The message names the file.
    """
    try:
        manifest = folder.manifest(path)
        step, files = int(manifest["step"]), dict(manifest["sha256"])
        # A damaged manifest may claim any number of ranks. One file more than the manifest lists is
        # enough to report a missing file.
        world_size = min(int(manifest["world_size"]), len(files) + 1)
        if world_size < 1:
            raise ValueError("it lists no ranks")
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UsageError(f"{path}: no checkpoint ({MANIFEST}: {error})") from None
    names = [f"rank{rank}.pt" for rank in range(world_size)]
    return Checkpoint(path, step, [_read(path / name, files.get(name)) for name in names])


def _read(file: Path, sha256: object) -> dict[str, Any]:
    try:
        descriptor = open_own(file)
    except FileNotFoundError:
        raise UsageError(f"{file}: damaged (the file is missing)") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    with open(descriptor, "rb") as content:
        return _read_shard(file, content, sha256)


def _read_shard(file: Path, content: BinaryIO, sha256: object) -> dict[str, Any]:
    try:
        is_good = hashlib.file_digest(content, "sha256").hexdigest() == sha256  # type: ignore[arg-type]
        content.seek(0)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    if not is_good:
        raise UsageError(f"{file}: damaged (its SHA-256 is not the manifest's)")
    # weights_only: a pickle could run code, and the hash protects against damage only, because
    # whoever changes a shard can change the manifest.
    try:
        shard = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch.load raises nearly any exception type for a file that another program made.
        reason = (str(error).splitlines() or [type(error).__name__])[0][:100]
        raise UsageError(f"{file}: not a checkpoint of ours ({reason})") from None
    if not isinstance(shard, dict):
        raise UsageError(f"{file}: not a checkpoint of ours (it holds no dictionary)")
    return shard


def find(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest good checkpoint, and a line for each damaged one that was passed over.

    Args:
        path: A run directory, its `checkpoints` folder, or one checkpoint.

    Raises:
        UsageError: If `path` is one checkpoint and this checkpoint is damaged.
    """
    if (path / MANIFEST).exists():
        return load(path), []
    directory = _directory(path)
    return _first_good(directory, reversed(folder.steps(directory)))


def find_best(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the best good checkpoint by the metrics in the manifests; otherwise like `find`.

    The checkpoint is None if no checkpoint holds evaluated weights.
    """
    directory = _directory(path)
    return _first_good(directory, folder.best_first(directory))


def _directory(path: Path) -> Path:
    refuse_special(path / "checkpoints", folder=True)
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def _first_good(directory: Path, steps: Iterable[int]) -> tuple[Checkpoint | None, list[str]]:
    bad: list[str] = []
    for step in steps:
        try:
            refuse_special(path := folder.path_of(directory, step), folder=True)
            return load(path), bad
        except UsageError as error:
            bad.append(str(error))
    return None, bad
