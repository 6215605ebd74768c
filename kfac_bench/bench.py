"""A benchmark is data: conf/benchmark/NAME.yaml says which runs make a table.

``axes`` times ``seeds`` are the cells; a cell is a ``kfac-train`` process whose overrides are
``overrides`` with the axes' values filled in. A finished cell is not run again; a failed one
counts as a missed target.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kfac_bench import compose
from kfac_bench.config import TrainConfig
from kfac_bench.errors import UsageError
from kfac_bench.events import RunEnded, read
from kfac_bench.run_directory import RunDirectory


@dataclass
class Tuning:
    """How the settings of the cells are found: the same number of trials for each optimizer."""

    overrides: list[str] = MISSING
    """Of every trial, with the axes' values filled in."""
    trials: int = MISSING
    seeds: list[int] = MISSING
    """Not those of the table: settings must not be picked by the runs that are shown."""
    space: dict[str, dict[str, Any]] = MISSING
    """Optimizer to override to range: ``{log: [low, high]}`` or ``{choice: [...]}``, or what
    the option always is."""
    experiment: str = MISSING
    """The experiment file that the best trial becomes, with the axes' values filled in."""


@dataclass
class Benchmark:
    """One table: conf/benchmark/NAME.yaml."""

    title: str = MISSING
    axes: dict[str, list[str]] = MISSING
    overrides: list[str] = MISSING
    seeds: list[int] = field(default_factory=lambda: [0])
    tuning: Tuning | None = None


@dataclass(frozen=True)
class Cell:
    """One run: where it stands in the table, and the overrides that make it."""

    label: str
    overrides: tuple[str, ...]

    def config(self) -> TrainConfig:
        """The configuration, checked."""
        return compose.load(self.overrides)

    def path(self) -> Path:
        """Its run directory: a function of its configuration."""
        return RunDirectory(self.config()).path


def load(name: str) -> Benchmark:
    """conf/benchmark/NAME.yaml, checked against the schema."""
    path = compose.CONF_DIR / "benchmark" / f"{name}.yaml"
    known = compose.options_of("benchmark")
    if name not in known:
        raise UsageError(f"{name}: no such benchmark; choose one of {', '.join(known)}")
    try:
        result = OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(Benchmark), OmegaConf.load(path))
        )
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise UsageError(f"{path}: {str(error).splitlines()[0]}") from None
    assert isinstance(result, Benchmark)
    return result


def points(benchmark: Benchmark) -> Iterator[dict[str, str]]:
    """Every combination of the axes' values."""
    for values in itertools.product(*benchmark.axes.values()):
        yield dict(zip(benchmark.axes, values, strict=True))


def cells(benchmark: Benchmark, runs_dir: str, seeds: Sequence[int] | None = None) -> list[Cell]:
    """The grid of the axes times the seeds.

    Seeds are the outer loop: what slows the machine for a while slows every setting.
    """
    result = []
    for seed in benchmark.seeds if seeds is None else seeds:
        for point in points(benchmark):
            overrides = [text.format(**point) for text in benchmark.overrides]
            label = " ".join([*point.values(), f"seed {seed}"])
            result.append(Cell(label, (*overrides, f"seed={seed}", f"runs_dir={runs_dir}")))
    return result


def run_cells(todo: Sequence[Cell], say: Callable[[str], None]) -> int:
    """Run every cell that has not ended, one after the other; how many failed."""
    failed = 0
    for number, cell in enumerate(todo, start=1):
        good, said = run_cell(cell)
        failed += not good
        say(f"[{number}/{len(todo)}] {cell.label}: {said}")
    return failed


def run_cell(cell: Cell) -> tuple[bool, str]:
    """Run the cell unless it has ended; whether it has now, and how, in words."""
    before = _outcome(cell)
    if before:
        return True, f"{before} (before)"
    error = _run(cell)
    outcome = _outcome(cell)
    return (False, f"failed: {error}") if outcome is None else (True, outcome)


def _run(cell: Cell) -> str:
    """Run one cell in a process of its own; the last line of its error output."""
    command = [sys.executable, "-m", "kfac_bench", *cell.overrides]
    done = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    lines = done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or ["no output"]
    return f"{lines[-1]} (exit code {done.returncode})"


def _outcome(cell: Cell) -> str | None:
    """How the cell's run ended, None if it has not."""
    path = cell.path()
    if not (path / "events.jsonl").exists():
        return None
    ended = next((e for e in reversed(read(path)) if isinstance(e, RunEnded)), None)
    if ended is None or ended.status == "interrupted":
        return None
    return f"{ended.status} at step {ended.step}, {ended.train_s:.2f} s {ended.message}".strip()
