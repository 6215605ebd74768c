"""Jobs of Slurm: runs that go one after the other, and the cells of a row in waves.

Some runs start from other runs, such as the second phase of a pre-training. The other runs are an
earlier wave: its last job submits the next wave.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kfac_bench.benchmark import grid, run_end
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from kfac_bench.benchmark.grid import Cell
    from kfac_bench.benchmark.suite import BenchmarkRow

_PACKAGE = Path(__file__).parents[1]
SCRIPTS = next(p for p in (_PACKAGE / "slurm", _PACKAGE.parent / "slurm") if p.is_dir())
"""The folder slurm/ of the installed package, or of the checkout."""


def submit(
    commands: Mapping[str, Sequence[str]],
    after: Sequence[str],
    folder: Path,
    options: Sequence[str] = (),
    *,
    before: Sequence[str] = (),
    run_paths: Mapping[str, Path] | None = None,
) -> list[str]:
    """Submit a job for each command and one for ``after``; return their ids in that order.

    * Each command runs on all tasks of its job. slurm/common.sh handles signals and requeueing.
    * ``after`` runs on one task when all other jobs have ended, successfully or not. A requeued job
      has not ended. Two such jobs of one folder never run at the same time.
    * The output goes to ``FOLDER/slurm/LABEL-ID.out``.
    * A command that is submitted again while its job is in the queue waits for that job. A complete
      run of kfac-train is not trained again. Commands with the same run directory also wait for
      each other.
    * Give runs a name (``run_id=``). Otherwise the name of a run contains the number of its job.

    Args:
        commands: The commands by label.
        after: The last command.
        folder: The folder of the results.
        options: Options of sbatch, such as ``--ntasks=2``.
        before: Ids of earlier jobs, which ``after`` waits for. They are useless without these jobs.
        run_paths: The run directories of commands, by label.

    Raises:
        UsageError: There is no Slurm, or Slurm refuses a job. Then these jobs and those in
            ``before`` are cancelled. Or the folder cannot be written, or has a backslash in its
            path.
    """
    output = folder / "slurm"
    if "\\" in str(folder):
        raise UsageError(
            f"{folder}: sbatch takes no backslash in the path of an output; choose another folder"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{output}: cannot be written ({error.strerror})") from None
    ids: list[str] = []
    try:
        for label, command in commands.items():
            name = _job_name(label, folder, (run_paths or {}).get(label))
            # Jobs with the same name run one after the other, never at the same time.
            once = ["--dependency=singleton", *options]
            ids.append(_sbatch(name, output / _plain(label), once, command))
        when = f",afterany:{':'.join([*before, *ids])}" if before or ids else ""
        last = [*options, "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
        last.append(f"--dependency=singleton{when}")
        name = f"report-{_digest(str(folder.resolve()))}"
        ids.append(_sbatch(name, output / "report", last, after))
    except UsageError as error:
        raise UsageError(f"{error}{_cancel([*before, *ids])}") from None
    except KeyboardInterrupt:
        _cancel([*before, *ids])
        raise
    return ids


def _job_name(label: str, folder: Path, run_path: Path | None) -> str:
    """Return the name of a command's job. Jobs with the same name never run at the same time."""
    if run_path is None:
        return f"{_plain(label)}-{_digest(str(folder.resolve()), label)}"
    # Two benchmarks may share a run. Their labels for the run and their folders differ.
    path = run_path.resolve()
    return f"{_plain(path.name)}-{_digest(str(path))}"


def _cancel(ids: Sequence[str]) -> str:
    """Cancel the jobs, and return a sentence about them; nothing if there are none."""
    if not ids:
        return ""
    done = subprocess.run(["scancel", *ids], capture_output=True)  # noqa: S603, S607
    if done.returncode:
        return f". Cancel the jobs submitted before: scancel {' '.join(ids)}"
    return f". The jobs submitted before ({' '.join(ids)}) are cancelled"


def _sbatch(name: str, output: Path, options: Sequence[str], command: Sequence[str]) -> str:
    """Submit one job and return its id. No shell reads the command's arguments."""
    own = [f"--job-name={name}", f"--output={pattern(output)}-%j.out"]
    call = ["sbatch", "--parsable", *own, *options, str(SCRIPTS / "cell.sbatch"), *command]
    try:
        done = subprocess.run(  # noqa: S603
            call, capture_output=True, text=True, env=os.environ | {"KFAC_SLURM": str(SCRIPTS)}
        )
    except FileNotFoundError:
        raise UsageError(
            "--launcher slurm: there is no sbatch on this machine; "
            "run on a node of the cluster, or use --launcher local"
        ) from None
    except OSError as error:  # The command may be too long.
        raise UsageError(f"--launcher slurm: sbatch cannot be started ({error.strerror})") from None
    if done.returncode:
        line = (done.stderr.strip().splitlines() or ["sbatch failed without a message"])[-1]
        raise UsageError(f"--launcher slurm: {line}")
    return done.stdout.strip().partition(";")[0]  # sbatch prints id;cluster.


def pattern(output: Path) -> str:
    """Return a path as sbatch reads it in ``--output``, where %j and others stand for numbers."""
    return str(output).replace("%", "%%")


def _plain(label: str) -> str:
    """Return the label as a file name: no blanks, no slashes, no patterns of sbatch such as %j."""
    return re.sub(r"[^\w.=+-]+", "-", label)[:100]


def _digest(*parts: str) -> str:
    return hashlib.sha256(os.fsencode("\0".join(parts))).hexdigest()[:8]


KFAC_BENCH = ("-c", "from kfac_bench.cli import bench; bench()")


def waves(row: BenchmarkRow) -> list[list[Cell]]:
    """Return the waves in order: first the runs that others start from, at last the cells."""
    # The runs at position i of `before` are wave i. Cells share runs, so each path counts once.
    depth = max((len(cell.before) for cell in row.cells), default=0)
    before: list[dict[Path, Cell]] = [{} for _ in range(depth)]
    for cell in row.cells:
        for i, first in enumerate(cell.before):
            # Each of these runs starts from the runs before it.
            before[i][first.path()] = replace(first, before=cell.before[:i])
    return [*(list(each.values()) for each in before), list(row.cells)]


def submit_wave(
    row: BenchmarkRow,
    words: Sequence[str],
    wave: int,
    options: Sequence[str],
    *,
    only: str = "",
    retry: bool = False,
) -> tuple[int, list[str]]:
    """Submit a wave, and after it a job for the next wave or the report.

    Computed cells are computed at once, in this process.

    Args:
        row: The row.
        words: The words of the command line, for the job that follows.
        wave: The number of the wave, from 0 on.
        options: Options of sbatch.
        only: What ``--only`` says, for the next wave. The report has all cells.
        retry: Whether failed cells run again.

    Returns:
        How many cells have failed already, and the lines to print.

    Raises:
        UsageError: As :func:`kfac_bench.benchmark.slurm_jobs.submit`.
    """
    failed, lines = 0, []
    for each in row.computed:
        is_good, text = each.run()
        if not is_good:
            failed += 1
            lines.append(f"{each.label}: {text}")
    all_waves = waves(row)
    is_last = wave + 1 == len(all_waves)
    todo = []
    for cell in all_waves[wave]:
        if not run_end.will_run(cell.path(), retry=retry):
            continue
        reason, has_failed = grid.obstacle(cell)
        if not reason:
            todo.append(cell)
            continue
        lines.append(f"{cell.label}: not submitted: {reason}")
        failed += has_failed
        # As on one machine, a record blocks only cells of the table, never a run before them.
        if is_last and has_failed:
            grid.record_blocked(cell, reason)
    after = _follow_up(row, words, wave, options, only=only, retry=retry)
    ids = _submit_cells(row, todo, options, after)
    count = f"{len(todo)} of {len(all_waves[wave])} cells"
    what = "report" if is_last else f"next of {len(all_waves)} waves"
    return failed, [
        *lines,
        f"{row.name}: {count} submitted, then the {what}",
        f"{row.name}: jobs {' '.join(ids)}",
    ]


def _follow_up(
    row: BenchmarkRow,
    words: Sequence[str],
    wave: int,
    options: Sequence[str],
    *,
    only: str,
    retry: bool,
) -> list[str]:
    """Return the command that submits the wave after this one, or that writes the whole report."""
    is_last = wave + 1 == len(waves(row))
    command = ["report" if is_last else "run", row.name, *words]
    if not is_last:
        command += ["--only", only] if only else []
        command += ["--launcher", "slurm", "--wave", str(wave + 1)]
        command += [f"--sbatch={shlex.join(options)}", *["--retry"] * retry]
    return [sys.executable, *KFAC_BENCH, *command]


def _submit_cells(
    row: BenchmarkRow, todo: Sequence[Cell], options: Sequence[str], after: Sequence[str]
) -> list[str]:
    """Submit the cells and the command after all of them; return the ids of the jobs."""
    by_ranks: dict[int, list[Cell]] = {}
    for cell in todo:
        by_ranks.setdefault(cell.ranks, []).append(cell)
    ids: list[str] = []
    # Each rank is a task of its job, so cells with different ranks need different options.
    for ranks, cells in by_ranks.items():
        commands = {f"{row.name} {cell.label}": cell.rank_command() for cell in cells}
        run_paths = {f"{row.name} {cell.label}": cell.path() for cell in cells}
        tasks = [*options, f"--ntasks={ranks}"]
        behind = after if len(by_ranks) == 1 else ["true"]
        ids += submit(commands, behind, row.folder, tasks, before=ids, run_paths=run_paths)
    if len(by_ranks) != 1:
        ids += submit({}, after, row.folder, options, before=ids)
    return ids
