"""``launcher=slurm``: the cells of a row as jobs, in waves.

Some runs start from other runs, such as the second phase of a pre-training. The other runs are an
earlier wave: its last job submits the next wave.
"""

import sys
from collections.abc import Sequence

from kfac_bench.benchmark import run_end
from kfac_bench.benchmark.grid import Cell
from kfac_bench.benchmark.suite import BenchmarkRow

KFAC_BENCH = ("-c", "from kfac_bench.cli import bench; bench()")


def waves(row: BenchmarkRow) -> list[list[Cell]]:
    """Return the waves in order: first the runs that others start from, at last the cells."""
    # The runs at position i of `before` are wave i. Cells share runs, so each path counts once.
    depth = max((len(cell.before) for cell in row.cells), default=0)
    before = [
        list({c.before[i].path(): c.before[i] for c in row.cells if len(c.before) > i}.values())
        for i in range(depth)
    ]
    return [*before, list(row.cells)]


def submit(
    row: BenchmarkRow,
    words: Sequence[str],
    wave: int,
    options: Sequence[str],
    *,
    retry: bool = False,
) -> list[str]:
    """Submit a wave, and after it a job for the next wave or the report; return what to print.

    Computed cells are computed at once, in this process.

    Args:
        row: The row.
        words: The words of the command line, for the job that follows.
        wave: The number of the wave, from 0 on.
        options: Options of sbatch.
        retry: Whether failed cells run again.

    Raises:
        UsageError: As :func:`kfac_bench.benchmark.slurm_submit.submit`.
    """
    from kfac_bench.benchmark import slurm_submit

    lines = []
    for each in row.computed:
        is_good, text = each.run()
        if not is_good:
            lines.append(f"{each.label}: {text}")
    all_waves = waves(row)
    todo = [cell for cell in all_waves[wave] if run_end.will_run(cell.path(), retry=retry)]
    is_last = wave + 1 == len(all_waves)
    follow_up = ["report" if is_last else "run", row.name, *words]
    if not is_last:
        follow_up += ["--wave", str(wave + 1), f"--sbatch={' '.join(options)}"]
        follow_up += ["--retry"] * retry
    after = [sys.executable, *KFAC_BENCH, *follow_up]
    by_ranks: dict[int, dict[str, list[str]]] = {}
    for cell in todo:
        by_ranks.setdefault(cell.ranks, {})[f"{row.name} {cell.label}"] = cell.rank_command()
    ids: list[str] = []
    # Each rank is a task of its job, so cells with different ranks need different options.
    for ranks, commands in by_ranks.items():
        tasks = [*options, f"--ntasks={ranks}"]
        behind = after if len(by_ranks) == 1 else ["true"]
        ids += slurm_submit.submit(commands, behind, row.folder, tasks, before=ids)
    if len(by_ranks) != 1:
        when = [f"--dependency=afterany:{':'.join(ids)}"] if ids else []
        ids += slurm_submit.submit({}, after, row.folder, [*options, *when], before=ids)
    count = f"{len(todo)} of {len(all_waves[wave])} cells"
    what = "report" if is_last else f"next of {len(all_waves)} waves"
    return [
        *lines,
        f"{row.name}: {count} submitted, then the {what}",
        f"{row.name}: jobs {' '.join(ids)}",
    ]
