"""Reading: find, verify and load checkpoints, which hold data and never code.

torch.load with weights_only runs no code, but it reads tensors that no checkpoint of ours has and
that training cannot use. A file from somebody else may hold such tensors on purpose.
kfac_bench.torch_archive checks a file before it is read, and `_check_tensors` what it held.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kfac_bench import torch_archive
from kfac_bench.errors import UsageError, first_line
from kfac_bench.record import checkpoint_folder
from kfac_bench.record.checkpoint_folder import MANIFEST
from kfac_bench.record.own_files import refuse_special

MOST_LEVELS = 100
"""Most levels of containers in a shard. A state of ours has about 6."""
MOST_PARTS = 1_000_000
"""Most entries of all containers in a shard together."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: the shards of all ranks, in the order of ranks."""

    path: Path
    step: int
    shards: list[dict[str, Any]]

    def weights(self) -> dict[str, Tensor]:
        """Return the model's parameters and buffers by name, or their average (``trainer.ema``).

        Raises:
            UsageError: If the checkpoint holds no model.
        """
        average = self.shards[0].get("ema")
        holder = average if isinstance(average, dict) else self.shards[0]
        model = holder.get("model")
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
    step, hashes = checkpoint_folder.shards(path)
    return Checkpoint(path, step, [_read(file, sha256) for file, sha256 in hashes.items()])


def _read(file: Path, sha256: object) -> dict[str, Any]:
    # weights_only: a pickle could run code, and the hash protects against damage only, because
    # whoever changes a shard can change the manifest.
    with checkpoint_folder.open_verified(file, sha256) as content:
        try:
            torch_archive.check_archive(content)
            # Sparse tensors, about which torch warns, are refused below.
            with warnings.catch_warnings(action="ignore"):
                shard = torch.load(content, map_location="cpu", weights_only=True)
            _check_tensors(shard)
        except Exception as error:
            # torch.load raises nearly any exception type for a file that another program made.
            reason = first_line(error)[:200]
            raise UsageError(f"{file}: not a checkpoint of ours ({reason})") from None
    if not isinstance(shard, dict):
        raise UsageError(f"{file}: not a checkpoint of ours (it holds no dictionary)")
    return shard


def _check_tensors(shard: Any) -> None:
    """Check that all tensors in nested containers are plain, and that the containers are small.

    Raises:
        ValueError: A tensor is sparse, quantized, complex or of another unusual kind, or several
            of its elements share one place in memory. The message names the tensor. Or a container
            occurs in itself or so often that no program could read all of it.
    """
    remaining: list[tuple[tuple[Any, ...], Any]] = [((), shard)]
    count = 0
    while remaining:
        keys, value = remaining.pop()
        count += 1
        if len(keys) > MOST_LEVELS or count > MOST_PARTS:
            raise ValueError(f"it has more than {MOST_LEVELS} levels or {MOST_PARTS} parts")
        if isinstance(value, Tensor):
            if oddity := _oddity(value):
                raise ValueError(f"{'.'.join(map(str, keys))} {oddity}")
        elif isinstance(value, dict | list | tuple):
            parts: Iterable[tuple[Any, Any]]
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            remaining += [((*keys, key), part) for key, part in parts]


def _oddity(x: Tensor) -> str | None:
    """Return why a tensor is not plain, as the rest of a sentence; None if it is plain."""
    if x.layout is not torch.strided:
        return f"is sparse ({x.layout})"
    if x.is_quantized:
        return f"is quantized ({x.dtype})"
    if x.is_complex():
        return f"is complex ({x.dtype})"
    if type(x) not in (Tensor, nn.Parameter) or x.is_nested or x.device.type != "cpu":
        return f"is no plain tensor ({type(x).__name__} on {x.device})"
    if _overlaps(x):
        return f"has the shape {list(x.shape)} with the strides {list(x.stride())}, which overlap"
    return None


def _overlaps(x: Tensor) -> bool:
    """Return whether two elements may share one place in memory, as after `expand`."""
    if x.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


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
    return _first_good(directory, reversed(checkpoint_folder.steps(directory)))


def find_best(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the best good checkpoint by the metrics in the manifests; otherwise like `find`.

    The checkpoint is None if no checkpoint holds evaluated weights.
    """
    directory = _directory(path)
    return _first_good(directory, checkpoint_folder.best_first(directory))


def _directory(path: Path) -> Path:
    refuse_special(path / "checkpoints", folder=True)
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def _first_good(directory: Path, steps: Iterable[int]) -> tuple[Checkpoint | None, list[str]]:
    bad: list[str] = []
    for step in steps:
        try:
            refuse_special(path := checkpoint_folder.path_of(directory, step), folder=True)
            return load(path), bad
        except UsageError as error:
            bad.append(str(error))
    return None, bad
