"""A run's weights as one safetensors file, which any program can read and none can run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kfac_bench.errors import UsageError
from kfac_bench.record.events import RunStarted, read
from kfac_bench.training import checkpoint
from kfac_bench.training.checkpoint import Checkpoint
from kfac_bench.training.weights import SAFETENSORS


def export(run: Path, out: Path | None = None, *, best: bool = False) -> list[str]:
    """Write the weights of a run's newest good checkpoint, or of its best; lines that say what.

    ``run`` is a run directory, its ``checkpoints`` or one checkpoint; ``out`` a file
    (RUN/model.safetensors). Parameters and buffers have the model's own names. The metadata are
    strings: ``format``, ``step``, ``checkpoint``, and of a run directory ``run_id`` and ``config``,
    which is JSON. Raises :class:`UsageError` if there is no such run or no good checkpoint.
    """
    if not run.exists():
        raise UsageError(f"{run}: no such run")
    saved, bad = checkpoint.find_best(run) if best else checkpoint.find(run)
    if saved is None:
        what = "checkpoint of evaluated weights" if best else "checkpoint"
        raise UsageError("; ".join([f"{run}: no good {what} there", *bad]))
    path = out or (run if run.is_dir() else Path()) / SAFETENSORS
    weights = _weights(saved)
    _write(weights, {"format": "pt", **_about(run, saved)}, path)
    numel = sum(t.numel() for t in weights.values())
    said = f"{path}: {len(weights)} tensors, {numel:,} numbers, of step {saved.step}"
    return [*(f"passed over: {line}" for line in bad), said]


def _weights(saved: Checkpoint) -> dict[str, Tensor]:
    model = saved.shards[0].get("model")
    if not isinstance(model, Mapping) or not all(
        isinstance(name, str) and isinstance(t, Tensor) for name, t in model.items()
    ):
        raise UsageError(f"{saved.path}: it holds no model")
    # Each in memory of its own: the format knows no tied weights.
    return {name: t.clone(memory_format=torch.contiguous_format) for name, t in model.items()}


def _about(run: Path, saved: Checkpoint) -> dict[str, str]:
    about = {"step": str(saved.step), "checkpoint": saved.path.name}
    try:
        events = read(run)
    except UsageError:  # a checkpoint alone
        return about
    started = next((e for e in events if isinstance(e, RunStarted)), None)
    if started is not None:
        about |= {"run_id": str(started.run_id), "config": json.dumps(started.config)}
    return about


def _write(weights: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise UsageError(
            "kfac-bench export needs safetensors: pip install 'kfac-bench[language]'"
        ) from None
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(dict(weights), partial, metadata=dict(metadata))
        os.replace(partial, path)
    except Exception as error:  # its writer raises its own for a full disk
        partial.unlink(missing_ok=True)
        raise UsageError(f"{path}: cannot be written ({str(error).splitlines()[0]})") from None
