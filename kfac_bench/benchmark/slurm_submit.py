"""A benchmark's cells as jobs of Slurm, and one more when all have ended."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from kfac_bench.errors import UsageError

_PACKAGE = Path(__file__).parents[1]
SCRIPTS = next(p for p in (_PACKAGE / "slurm", _PACKAGE.parent / "slurm") if p.is_dir())
"""slurm/ of the wheel, or of the checkout."""


def submit(
    commands: Mapping[str, Sequence[str]],
    after: Sequence[str],
    folder: Path,
    options: Sequence[str] = (),
) -> list[str]:
    """Submit a job for each command, by label, and one for ``after``; their ids, in that order.

    ``options`` are sbatch's (``--ntasks=2``): each command runs on all tasks of its job, with
    notice, requeue and state as in slurm/common.sh; ``after`` on one task, when all others have
    ended, however (``afterany``; a requeued job has not). Output: ``FOLDER/slurm/LABEL-ID.out``. A
    command that is submitted again while its job is there waits for that one (``singleton``); a
    run of kfac-train that is complete is not trained again. Give runs a name (``run_id=``), or
    it has the job's number in it.

    Raises :class:`UsageError` where there is no Slurm or it refuses a job: then none is left.
    """
    output = folder / "slurm"
    output.mkdir(parents=True, exist_ok=True)
    ids: list[str] = []
    try:
        for label, command in commands.items():
            name = f"{_plain(label)}-{_digest(str(folder.resolve()), label)}"
            once = ["--dependency=singleton", *options]
            ids.append(_sbatch(name, output / _plain(label), once, command))
        last = [*options, "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
        if ids:
            last.append(f"--dependency=afterany:{':'.join(ids)}")
        name = f"report-{_digest(str(folder.resolve()))}"
        ids.append(_sbatch(name, output / "report", last, after))
    except UsageError:
        if ids:
            subprocess.run(["scancel", *ids], check=False)  # noqa: S603, S607
        raise
    return ids


def _sbatch(name: str, output: Path, options: Sequence[str], command: Sequence[str]) -> str:
    """Submit; the job's id. What is submitted are arguments: no shell reads them."""
    own = [f"--job-name={name}", f"--output={output}-%j.out"]
    call = ["sbatch", "--parsable", *own, *options, str(SCRIPTS / "cell.sbatch"), *command]
    try:
        done = subprocess.run(  # noqa: S603
            call, capture_output=True, text=True, env=os.environ | {"KFAC_SLURM": str(SCRIPTS)}
        )
    except FileNotFoundError:
        raise UsageError(
            "launcher=slurm: there is no sbatch here; on a node of the cluster, or launcher=local"
        ) from None
    except OSError as error:  # a command that is too long
        raise UsageError(f"launcher=slurm: sbatch cannot be started ({error.strerror})") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UsageError(f"launcher=slurm: {said}")
    return done.stdout.strip().partition(";")[0]  # id;cluster


def _plain(label: str) -> str:
    """The label as a file's name: no blanks, no slashes, nothing that sbatch fills in."""
    return re.sub(r"[^\w.=+-]+", "-", label)[:100]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]
