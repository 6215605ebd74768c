"""One row of the suite: its cells run, and what they came to, read from their files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kfac_bench.benchmark import computed, grid, schema
from kfac_bench.benchmark.computed import ComputedCell
from kfac_bench.benchmark.grid import Cell
from kfac_bench.benchmark.result import CellRuns, Line, key_of, lines
from kfac_bench.benchmark.schema import Benchmark, BenchmarkProfile
from kfac_bench.benchmark.sheet import PENDING, Attempt
from kfac_bench.config import compose
from kfac_bench.errors import UsageError
from kfac_bench.record.events import EVENTS_FILE
from kfac_bench.record.runs import Run, load

ORDER = (
    "kaisa_memory_vs_fraction",
    "fig7_step_profile",
    "sec634_bert_interval",
    "fig8_resnet_scaling",
    "fig9bc_bert_scaling",
    "kaisa_fixed_memory_bert",
    "kaisa_fixed_memory_resnet50",
    "kaisa_unet_lgg",
    "table2_fig4_cifar_correctness",
    "table5_fig6_update_interval",
    "fig5a_resnet50_convergence",
    "table1_cifar_inv_vs_eigen",
    "table6_fig9a_maskrcnn_scaling",
    "fig5bc_maskrcnn_convergence",
    "table3_bert_lamb",
    "table4a_bert_kfac_phase2",
    "table4b_bert_kfac_phase1",
    "table4c_bert_kfac_both",
)
"""The papers' tables and figures. Cheap rows come first, so that results appear early."""


@dataclass(frozen=True)
class BenchmarkRow:
    """A benchmark at a size, with the user's overrides."""

    name: str
    benchmark: Benchmark
    profile: str
    sized: BenchmarkProfile
    cells: Sequence[Cell]
    computed: Sequence[ComputedCell]
    folder: Path
    overrides: Sequence[str] = field(default_factory=list)

    @property
    def all_cells(self) -> list[Cell | ComputedCell]:
        """Those that train, then the computed ones."""
        return [*self.cells, *self.computed]


def names(wanted: str) -> list[str]:
    """Of the rows that ``all`` means, or the one wanted."""
    return list(ORDER) if wanted == "all" else [wanted]


def row(
    name: str,
    profile: str | None,
    overrides: Sequence[str] = (),
    runs_dir: str | None = None,
    seeds: Sequence[int] | None = None,
) -> BenchmarkRow:
    """conf/benchmark/NAME.yaml at a size; runs go to ``runs/NAME``. Raises :class:`UsageError`."""
    benchmark = schema.load(name)
    label, sized = schema.profile_of(benchmark, profile)
    folder = runs_dir or f"runs/{name}"
    cells = grid.cells(benchmark, folder, seeds, profile, overrides)
    return BenchmarkRow(
        name,
        benchmark,
        label,
        sized,
        cells,
        computed.cells(benchmark, folder),
        Path(folder),
        overrides,
    )


def run(each: BenchmarkRow, say: Callable[[str], None], *, retry: bool = False) -> int:
    """Compute, then train, what is not there yet; how many cells failed."""
    failed, began = 0, time.monotonic()
    for cell in each.computed:
        good, said = cell.run()
        failed += not good
        if not good:
            say(f"{cell.label}: {said}")
    if each.computed:
        took = time.monotonic() - began
        say(f"{each.name}: {len(each.computed)} computed cells in {took:.0f} s")
    return failed + grid.run_cells(each.cells, say, retry=retry)


def attempts(each: BenchmarkRow) -> list[Attempt]:
    """What every cell came to, by its files alone."""
    found = []
    for cell in each.all_cells:
        path = cell.path()
        why = grid.failure(path)
        try:
            run = load(path) if why is None else None
        except UsageError as error:
            run, why = None, str(error) if (path / EVENTS_FILE).exists() else PENDING[0]
        if run is not None and isinstance(cell, Cell) and grid.ended(path) is None:
            why = PENDING[1]
        found.append(Attempt(cell.label, path, None if why else run, why or ""))
    return found


def results(each: BenchmarkRow, found: Sequence[Attempt]) -> list[Line]:
    """Lines of the row's table; cells that were not tried yet are not in it, failed ones are."""
    by_point = CellRuns()
    for cell, attempt in zip(each.all_cells, found, strict=True):
        key = key_of(cell.point)
        if isinstance(cell, ComputedCell):
            if attempt.run is not None:
                by_point.computed[key] = attempt.run
        elif attempt.run is not None or attempt.reason not in PENDING:
            by_point.trained.setdefault(key, {})[cell.seed] = attempt.run
    return lines(each.benchmark, by_point, each.sized.level)


def runs_of(found: Sequence[Attempt]) -> list[Run]:
    """The runs that trained."""
    runs = [attempt.run for attempt in found if attempt.run is not None]
    return [each for each in runs if "computed" not in each.started.config]


def rows_there() -> list[str]:
    """All benchmarks, those of the papers in the order in which ``all`` runs them."""
    return [*ORDER, *(n for n in compose.options_of("benchmark") if n not in ORDER)]
