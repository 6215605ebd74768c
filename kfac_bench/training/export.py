"""Export: a run's weights as one safetensors file, which holds data and no code."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kfac_bench.errors import UsageError, first_line
from kfac_bench.record.events import RunStarted, read
from kfac_bench.training import checkpoint
from kfac_bench.training.checkpoint import Checkpoint
from kfac_bench.training.weights import SAFETENSORS


def export(run: Path, out: Path | None = None, *, best: bool = False) -> list[str]:
    """Write the weights of a run's newest good checkpoint to a file.

    Parameters and buffers keep the model's names. The file's metadata are strings: `format`, `step`
    and `checkpoint`; for a run directory also `run_id` and `config` (JSON).

    Args:
        run: A run directory, its `checkpoints` folder, or one checkpoint.
        out: The file to write. The default is RUN/model.safetensors.
        best: Take the best kept checkpoint, not the newest.

    Returns:
        Lines for the user: damaged checkpoints that were passed over, and what the file holds.

    Raises:
        UsageError: If a good checkpoint is missing, or the file cannot be written.
    """
    saved, bad = checkpoint.find_best(run) if best else checkpoint.find(run)
    if saved is None:
        what = "checkpoint of evaluated weights" if best else "checkpoint"
        raise UsageError("; ".join([f"{run} has no good {what}", *bad]))
    path = out or (run if run.is_dir() else Path()) / SAFETENSORS
    # The format knows no tied weights, so each tensor gets memory of its own.
    weights = {
        name: t.clone(memory_format=torch.contiguous_format) for name, t in saved.weights().items()
    }
    _write(weights, {"format": "pt", **_about(run, saved)}, path)
    numel = sum(t.numel() for t in weights.values())
    summary = f"{path}: {len(weights)} tensors with {numel:,} numbers, from step {saved.step}"
    return [*(f"passed over: {line}" for line in bad), summary]


def _about(run: Path, saved: Checkpoint) -> dict[str, str]:
    about = {"step": str(saved.step), "checkpoint": saved.path.name}
    try:
        events = read(run)
    except UsageError:
        # A single checkpoint has no event file.
        return about
    started = next((e for e in events if isinstance(e, RunStarted)), None)
    if started is not None:
        about |= {"run_id": str(started.run_id), "config": json.dumps(started.config)}
    return about


def _write(weights: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path) -> None:
    if not path.name:
        raise UsageError(f"{path}: cannot be written (it is a folder). Name a file with --out")
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(dict(weights), partial, metadata=dict(metadata))
        os.replace(partial, path)
    except Exception as error:
        # safetensors raises an exception type of its own, for example for a full disk.
        with suppress(OSError):
            partial.unlink()
        raise UsageError(f"{path}: cannot be written ({first_line(error)})") from None
