"""``kfac-bench scaling``: the steps from its options to the runs and the written results."""

import argparse
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kfac_bench import report
from kfac_bench.benchmark import run_end, slurm_jobs
from kfac_bench.benchmark.grid import Cell, run_cells
from kfac_bench.benchmark.local_runs import warn_if_busy
from kfac_bench.benchmark.scaling import scaling_report
from kfac_bench.benchmark.scaling.measured import ScalingPoint, measure, with_fraction
from kfac_bench.benchmark.scaling.scaling_report import scaling_table, stage_table
from kfac_bench.benchmark.slurm_jobs import KFAC_BENCH
from kfac_bench.config import compose
from kfac_bench.config.command_options import path_word, sbatch_options, whole_number
from kfac_bench.errors import UsageError
from kfac_bench.output import counted
from kfac_bench.record.runs import Run, load
from kfac_bench.simulate import hardware
from kfac_bench.simulate.hardware import Hardware
from kfac_bench.simulate.sweep import SGD, Intervals, Variant, efficiency, sweep, variant
from kfac_bench.whole_files import write_text

_MOST_RANKS, _MOST_ROUNDS, _MOST_STEPS = 4096, 100, 1_000_000
WINDOWS = 4
"""Intervals of decompositions that a run trains. The first interval warms up."""


@dataclass(frozen=True)
class ScalingRequest:
    """The checked input of a scaling measurement, from the command line."""

    words: Sequence[str]
    mode: str
    launcher: str
    sbatch: Sequence[str]
    overrides: Sequence[str]
    variants: Sequence[Variant]
    world_sizes: Sequence[int]
    cells: Sequence[Cell]
    """One round of one strategy on one number of ranks each."""
    folder: Path
    """Folder of the runs and of the results."""
    machine: Hardware | None
    """The machine to simulate; None: no simulation."""


def scaling(options: argparse.Namespace, words: Sequence[str], say: Callable[[str], None]) -> int:
    """Measure what the user asks for and write the results; return 1 if a run failed, else 0.

    Args:
        options: The parsed options of ``kfac-bench scaling``.
        words: The same options as words of a command line.
        say: Prints a line.

    Raises:
        UsageError: An option is wrong, or no run has finished.
    """
    request = _request(options, words)
    if request.launcher == "slurm":
        _submit(request, say)
        return 0
    failed = 0
    if request.launcher == "local":
        if any(run_end.will_run(cell.path(), retry=True) for cell in request.cells):
            warn_if_busy(say)  # before the runs themselves make the machine busy
        failed = run_cells(request.cells, say, retry=True)
    finished = [each for each in request.cells if _has_finished(each)]
    if not finished:
        raise UsageError(f"{request.folder}: no run has finished; measure with --launcher local")
    _write(request, [load(each.path()) for each in finished], say)
    return 1 if failed else 0


def _write(request: ScalingRequest, runs: Sequence[Run], say: Callable[[str], None]) -> None:
    """Write the tables, the figure and the page, and print the tables."""
    points = measure(runs)
    if not points:
        raise UsageError(
            f"{request.folder}: no run is long enough to measure a step; train without "
            "trainer.max_train_s, or use fewer --steps"
        )
    tables = [scaling_table(points), stage_table(points)]
    if missing := len(request.cells) - len(runs):
        note = f"missing: {missing} of {len(request.cells)} runs"
        tables[0] = replace(tables[0], notes=[note, *tables[0].notes])
    for table in tables:
        say(table.markdown())
    title = _title(request.mode, points)
    simulated: scaling_report.Simulated = {}
    where = ""
    if request.machine is not None:
        simulated = _simulated(request, request.machine)
        where = f"simulated, {request.machine.name}"
    folder = request.folder
    markdown = "\n".join(table.markdown() for table in tables)
    write_text(folder / "scaling.md", markdown)
    write_text(folder / "scaling.svg", scaling_report.svg(points, title, simulated, where))
    report.compare([run.path for run in runs], folder / "scaling.html", tables, title)
    for ending in ("md", "svg", "html"):
        say(str(folder / f"scaling.{ending}"))


def _title(mode: str, points: Sequence[ScalingPoint]) -> str:
    tasks = {point.task for point in points}
    return f"{mode} scaling" + (f": {tasks.pop()}" if len(tasks) == 1 else "")


def _simulated(request: ScalingRequest, machine: Hardware) -> scaling_report.Simulated:
    """Return the efficiencies of the same steps on a model of the machine."""
    from kfac_bench.simulate import workload  # This import loads torch.

    # The measured runs set this, too. Without K-FAC the workload would have no layers.
    has_kfac = any(each.strategy != SGD for each in request.variants)
    more = ["kfac.enabled=true"] if has_kfac else []
    config = compose.load([*request.overrides, *more])
    machine.check_precision(config.trainer.precision)
    cells = []
    intervals = Intervals(config.kfac.factor_update_freq, config.kfac.update_freq)
    for ranks in request.world_sizes:
        size = config.trainer.batch_size
        if request.mode == "strong":
            size = max(1, size // ranks)
        each = replace(config, trainer=replace(config.trainer, batch_size=size))
        work = workload.of_config(each)
        method, itemsize = config.kfac.method, workload.state_bytes(config)
        variants = request.variants
        cells += sweep(work, machine, variants, [ranks], intervals, method, itemsize=itemsize)
    simulated: dict[str, dict[int, float]] = {}
    for cell in cells:
        # Measured runs without K-FAC have the name of their optimizer.
        name = config.optimizer.name
        if cell.variant.strategy != SGD:
            name = with_fraction(cell.variant.strategy, cell.variant.fraction)
        simulated.setdefault(name, {})[cell.world_size] = efficiency(cells, cell)
    return simulated


def _submit(request: ScalingRequest, say: Callable[[str], None]) -> None:
    """Submit a job for each unfinished run; the last job of each world size writes the results."""
    if all(map(_has_finished, request.cells)):
        say("all runs have finished, so no job is submitted. --launcher none writes the results")
    # The last --launcher counts.
    after = [sys.executable, *KFAC_BENCH, "scaling", *request.words, "--launcher", "none"]
    for world_size in request.world_sizes:
        todo = [c for c in request.cells if c.ranks == world_size and not _has_finished(c)]
        commands = {each.label: each.rank_command() for each in todo}
        if commands:
            options = [*request.sbatch, f"--ntasks={world_size}"]
            jobs = slurm_jobs.submit(commands, after, request.folder, options)
            ids = f"jobs {jobs[0]} to {jobs[-1]}, the last writes the results"
            say(f"{counted(world_size, 'rank')}: {ids}")


def _request(options: argparse.Namespace, words: Sequence[str]) -> ScalingRequest:
    overrides, steps = options.overrides, options.steps
    _check_overrides(overrides)
    chosen = [variant(text) for text in options.strategy.split(",") if text != SGD]
    variants = list(dict.fromkeys([Variant(SGD), *chosen]))
    sizes = options.world_size.split(",")
    world_sizes = [whole_number("--world-size", text, _MOST_RANKS) for text in sizes]
    world_sizes = list(dict.fromkeys(world_sizes))
    cells = scaling_cells(
        overrides,
        variants,
        world_sizes,
        weak=options.mode == "weak",
        rounds=whole_number("--rounds", options.rounds, _MOST_ROUNDS),
        steps=whole_number("--steps", steps, _MOST_STEPS) if steps else None,
        runs_dir=str(options.runs_dir),
    )
    return ScalingRequest(
        words,
        options.mode,
        options.launcher,
        sbatch_options(options),
        overrides,
        variants,
        world_sizes,
        cells,
        options.runs_dir,
        _machine(options.hardware),
    )


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuse the options that differ between the runs of a measurement, or that it sets itself."""
    fixed = {word.partition("=")[0]: word for word in _fixed(1)}
    for word in overrides:
        name = word.lstrip("+").partition("=")[0]
        if name in ("kfac", "kfac.strategy", "kfac.grad_worker_fraction", "kfac.enabled"):
            raise UsageError(f"{word}: set --strategy instead; sgd is always measured too")
        if name == "from":
            raise UsageError(
                f"{word}: kfac-bench scaling reads no file of a run. Write the options of the run, "
                "such as model=resnet20"
            )
        if name == "recipe" and not word.endswith("=none"):
            raise UsageError(
                f"{word}: a recipe changes with the number of ranks. Write its options instead"
            )
        if name in ("seed", "run_id", "resume"):
            raise UsageError(f"{word}: each run has its own {name}; set --rounds for more runs")
        if name in fixed and word not in fixed.values():
            raise UsageError(f"{word}: kfac-bench scaling sets {name} itself; see --steps")


def _machine(name: str) -> Hardware | None:
    """Return the machine to simulate. A wrong name is reported before anything is measured."""
    from kfac_bench.simulate.simulate_options import hardware_path  # This import loads torch.

    return hardware.load(hardware_path(name, None)) if name else None


def scaling_cells(
    overrides: Sequence[str],
    variants: Sequence[Variant],
    world_sizes: Sequence[int],
    *,
    weak: bool,
    rounds: int,
    steps: int | None,
    runs_dir: str,
) -> list[Cell]:
    """Return the runs of every variant on every number of ranks, in rounds.

    Rounds are the outer loop. So a slow minute of the machine slows all variants alike.

    Args:
        overrides: The user's overrides of kfac-train.
        variants: The strategies, with SGD.
        world_sizes: The numbers of ranks.
        weak: Whether the configured batch size is that of one rank; else it is that of all ranks.
        rounds: How often each variant runs on each number of ranks.
        steps: Steps of a window; None: ``kfac.update_freq``.
        runs_dir: Where run directories go.

    Raises:
        UsageError: An override is wrong, or a rank would get no example.
    """
    base = compose.load(overrides)
    fixed = [*overrides, *_fixed(steps or base.kfac.update_freq), path_word("runs_dir", runs_dir)]
    if base.trainer.threads is None:
        fixed.append("trainer.threads=1")
    cells = []
    for number in range(rounds):
        for world_size in world_sizes:
            batch = base.trainer.batch_size * (world_size if weak else 1)
            for each in variants:
                own = (*fixed, f"trainer.batch_size={batch}", *_kfac(each), f"seed={number}")
                cells.append(_cell(each, world_size, number, own, runs_dir))
    return cells


def _fixed(window: int) -> list[str]:
    """Return the overrides that make every run measure alike, whatever an experiment file says."""
    return [
        "trainer.target=null",
        "trainer.max_epochs=null",
        "trainer.drop_last=true",
        f"trainer.max_steps={WINDOWS * window}",
        f"trainer.log_freq={window}",
        f"trainer.eval_freq={WINDOWS * window}",
        "trainer.predictions=0",
        f"trainer.checkpoint_freq={WINDOWS * window}",
        "trainer.pin=true",
        "trainer.time_stages=true",
        "logger=none",
    ]


def _cell(
    variant: Variant, world_size: int, number: int, overrides: tuple[str, ...], runs_dir: str
) -> Cell:
    config = compose.load(overrides)
    if config.trainer.batch_size < world_size:
        raise UsageError(
            f"trainer.batch_size={config.trainer.batch_size} leaves some of {world_size} ranks "
            "without an example; use --mode weak or a larger batch"
        )
    digest = hashlib.sha256(repr((world_size, overrides)).encode()).hexdigest()[:8]
    name = f"{variant.label.replace('/', '_').replace('@', '-')}-{world_size}-{number}-{digest}"
    label = f"{variant.label} {counted(world_size, 'rank')} round {number + 1}"
    return Cell(label, overrides, world_size, folder=Path(runs_dir) / name)


def _kfac(variant: Variant) -> tuple[str, ...]:
    """Return the overrides that select the variant."""
    if variant.strategy == SGD:
        return ("kfac=none", "kfac.enabled=false")
    share = "null" if variant.fraction is None else f"{variant.fraction:g}"
    return (
        f"kfac={variant.strategy}",
        "kfac.enabled=true",
        f"kfac.strategy={variant.strategy}",
        f"kfac.grad_worker_fraction={share}",
    )


def _has_finished(cell: Cell) -> bool:
    """Return whether the run is complete, so that it can be measured."""
    return (run_end.ended(cell.path()) or "").startswith("finished")
