"""``launcher=slurm``: a row's cells as jobs, runs that others start from in waves before them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kfac_bench.benchmark import grid
from kfac_bench.benchmark.grid import Cell
from kfac_bench.benchmark.suite import BenchmarkRow

KFAC_BENCH = ("-c", "from kfac_bench.cli import bench; bench()")


def waves(row: BenchmarkRow) -> list[list[Cell]]:
    """Cells by what must have ended before: first what others start from, the cells last."""
    depth = max((len(cell.before) for cell in row.cells), default=0)
    before = [
        list({c.before[i].path(): c.before[i] for c in row.cells if len(c.before) > i}.values())
        for i in range(depth)
    ]
    return [*before, list(row.cells)]


def submit(row: BenchmarkRow, words: Sequence[str], wave: int, options: Sequence[str]) -> list[str]:
    """Submit a wave, and behind it a job for the next one, or for the report; what to say.

    Computed cells are computed here and now. Raises :class:`UsageError` as ``launch.submit``.
    """
    from kfac_bench.benchmark import slurm_submit

    for each in row.computed:
        each.run()
    all_waves = waves(row)
    todo = [cell for cell in all_waves[wave] if grid.outcome(cell) is None]
    last = wave + 1 == len(all_waves)
    again = ["report" if last else "run", row.name, *words]
    again += [] if last else ["--wave", str(wave + 1), f"--sbatch={' '.join(options)}"]
    after = [sys.executable, *KFAC_BENCH, *again]
    by_ranks: dict[int, dict[str, list[str]]] = {}
    for cell in todo:
        of = by_ranks.setdefault(cell.ranks, {})
        of[f"{row.name} {cell.label}"] = [sys.executable, *cell.arguments()]
    said, ids = [], []
    for ranks, commands in by_ranks.items():  # a job's tasks are its ranks
        tasks = [*options, f"--ntasks={ranks}"]
        if len(by_ranks) == 1:
            ids = slurm_submit.submit(commands, after, row.folder, tasks)
            break
        ids += slurm_submit.submit(commands, ["true"], row.folder, tasks)
    if len(by_ranks) != 1:
        when = [f"--dependency=afterany:{':'.join(ids)}"] if ids else []
        ids += slurm_submit.submit({}, after, row.folder, [*options, *when])
    what = "report" if last else f"next of {len(all_waves)} waves"
    said.append(
        f"{row.name}: {len(todo)} of {len(all_waves[wave])} cells submitted, then the {what}"
    )
    return [*said, f"{row.name}: jobs {' '.join(ids)}"]
