"""A folder of checkpoints, seen through file names, manifests and hashes.

No shard is decoded here, so this file needs no torch. :mod:`kfac_bench.training.checkpoint` writes
and loads shards.
"""

import hashlib
import json
import math
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kfac_bench.errors import UsageError
from kfac_bench.record.own_files import open_own, read_own, write_own

MANIFEST = "manifest.json"
STEP_LIMIT = 10**18
"""Steps are smaller: the name of a folder has at most 18 digits."""


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


def add_metric(path: Path, metric: ValidationMetric) -> None:
    """Write the metric of a checkpoint that was saved before its evaluation.

    Raises:
        OSError, ValueError, UsageError: As :func:`manifest`, or the file cannot be written.
    """
    content = manifest(path) | {"metric": asdict(metric)}
    write_own(path / MANIFEST, json.dumps(content, indent=1).encode())


def shards(path: Path) -> tuple[int, dict[Path, object]]:
    """Return the step of one checkpoint, and the hash of each shard in the order of ranks.

    Raises:
        UsageError: If there is no valid manifest.
    """
    try:
        content = manifest(path)
        step, hashes = int(content["step"]), dict(content["sha256"])
        # A damaged manifest may claim any number of ranks. One file more than the manifest lists is
        # enough to report a missing file.
        world_size = min(int(content["world_size"]), len(hashes) + 1)
        if world_size < 1:
            raise ValueError("it lists no ranks")
        if not 0 <= step < STEP_LIMIT:
            raise ValueError(f"step {step:.3g} is not between 0 and {STEP_LIMIT:.0e}")
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UsageError(f"{path}: no checkpoint ({MANIFEST}: {error})") from None
    names = [f"rank{rank}.pt" for rank in range(world_size)]
    return step, {path / name: hashes.get(name) for name in names}


def open_verified(file: Path, sha256: object) -> BinaryIO:
    """Open a shard whose content has this hash.

    Raises:
        UsageError: If the shard is missing, damaged, or no regular file.
    """
    try:
        content = open(open_own(file), "rb")  # noqa: SIM115 -- the caller closes it.
    except FileNotFoundError:
        raise UsageError(f"{file}: damaged (the file is missing)") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    try:
        is_good = hashlib.file_digest(content, "sha256").hexdigest() == sha256
        content.seek(0)
    except OSError as error:
        content.close()
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    if not is_good:
        content.close()
        raise UsageError(f"{file}: damaged (its SHA-256 is not the manifest's)")
    return content


def is_good(path: Path) -> bool:
    """Return whether one checkpoint is complete and undamaged. It reads all shards."""
    try:
        for file, sha256 in shards(path)[1].items():
            open_verified(file, sha256).close()
    except UsageError:
        return False
    return True


def best_first(directory: Path) -> list[int]:
    """Return the steps of the checkpoints whose weights were evaluated, the best first.

    The newest manifest with a metric decides which metric counts and whether higher is better. If
    two values are equal, the newer checkpoint comes first.
    """
    metrics: dict[int, ValidationMetric] = {}
    for step in steps(directory):
        try:
            saved = manifest(path_of(directory, step))["metric"]
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


def remove_old(
    directory: Path, step: int, keep_last: int, keep_best: int, every: int | None = None
) -> None:
    """Remove all but the last checkpoints up to `step`, which was just written, and the best ones.

    A checkpoint of a later step is removed too. When the run continued, that checkpoint was damaged
    and passed over, so the run now takes another course. The last checkpoints are those of each
    `every` steps. Others, which an interruption has left, count only where these are too few.
    """
    so_far = [s for s in steps(directory) if s <= step]
    so_far.sort(key=lambda s: (s == step or every is None or s % every == 0, s))
    best = [s for s in best_first(directory) if s <= step][:keep_best]
    for old in set(steps(directory)) - {*so_far[-keep_last:], *best}:
        shutil.rmtree(path_of(directory, old), ignore_errors=True)
