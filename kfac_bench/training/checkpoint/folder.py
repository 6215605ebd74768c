"""A folder of checkpoints, seen through file names and manifests: no shard is read here."""

import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfac_bench.errors import UsageError
from kfac_bench.record.own_files import read_own

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class ValidationMetric:
    """The value of the task's metric for a checkpoint's weights."""

    name: str
    value: float
    higher_is_better: bool


def path_of(directory: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step`."""
    return directory / f"step-{step:08d}"


def steps(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, in ascending order."""
    names = [p.name for p in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(m[1]) for n in names if (m := re.fullmatch(r"step-(\d{1,18})", n)))


def manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of one checkpoint.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file holds no JSON object.
        UsageError: If the file is a link, no regular file, or too large.
    """
    try:
        content = json.loads(read_own(path / MANIFEST))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def best_first(directory: Path) -> list[int]:
    """Return the steps of the checkpoints whose weights were evaluated, the best first.

    The newest manifest with a metric decides which metric counts and whether higher is better. If
    two values are equal, the newer checkpoint comes first.
    """
    metrics: dict[int, ValidationMetric] = {}
    for step in steps(directory):
        try:
            # Manifests of older versions have the key too, so it keeps its name.
            saved = manifest(path_of(directory, step))["figure"]
            value = float(saved["value"])
            if math.isfinite(value):
                metrics[step] = ValidationMetric(
                    str(saved["name"]), value, bool(saved["higher_is_better"])
                )
        except (OSError, ValueError, KeyError, TypeError, OverflowError, UsageError):
            continue
    if not metrics:
        return []
    newest = metrics[max(metrics)]
    comparable = [step for step in metrics if metrics[step].name == newest.name]
    sign = -1 if newest.higher_is_better else 1
    return sorted(comparable, key=lambda step: (sign * metrics[step].value, -step))


def remove_old(directory: Path, step: int, keep_last: int, keep_best: int) -> None:
    """Remove all but the last checkpoints up to `step`, which was just written, and the best ones.

    A checkpoint of a later step is removed too. When the run continued, that checkpoint was damaged
    and passed over, so the run now takes another course.
    """
    so_far = [s for s in steps(directory) if s <= step]
    best = [s for s in best_first(directory) if s <= step][:keep_best]
    for old in set(steps(directory)) - {*so_far[-keep_last:], *best}:
        shutil.rmtree(path_of(directory, old), ignore_errors=True)
