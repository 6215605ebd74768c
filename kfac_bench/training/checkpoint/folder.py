"""What a folder of checkpoints holds, by names and manifests alone: no shard is read here."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Figure:
    """The validation figure of a checkpoint's weights."""

    name: str
    value: float
    higher_is_better: bool


def path_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return directory / f"step-{step:08d}"


def steps(directory: Path) -> list[int]:
    """Steps of the checkpoints in a folder, ascending."""
    names = [p.name for p in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(m[1]) for n in names if (m := re.fullmatch(r"step-(\d{1,18})", n)))


def manifest(path: Path) -> dict[str, Any]:
    """Of one checkpoint. Raises ``OSError`` or ``ValueError``."""
    try:
        found = json.loads((path / MANIFEST).read_text())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def best_first(directory: Path) -> list[int]:
    """Steps of the checkpoints whose weights were evaluated, the best first; of equals the newer.

    Better is what the newest manifest with a figure says.
    """
    figures: dict[int, tuple[str, float, bool]] = {}
    for step in steps(directory):
        try:
            said = manifest(path_of(directory, step))["figure"]
            value = float(said["value"])
            if math.isfinite(value):
                figures[step] = (str(said["name"]), value, bool(said["higher_is_better"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            continue
    if not figures:
        return []
    name, _, higher = figures[max(figures)]
    alike = [step for step in figures if figures[step][0] == name]
    return sorted(alike, key=lambda s: (figures[s][1] * (-1 if higher else 1), -s))


def remove_old(directory: Path, step: int, keep_last: int, keep_best: int) -> None:
    """Keep the last checkpoints up to the one of ``step`` just written, and the best ones.

    Later ones were passed over as damaged when the run was taken up: they are void.
    """
    so_far = [s for s in steps(directory) if s <= step]
    best = [s for s in best_first(directory) if s <= step][:keep_best]
    for old in set(steps(directory)) - {*so_far[-keep_last:], *best}:
        shutil.rmtree(path_of(directory, old), ignore_errors=True)
