"""``kfac-bench scaling``: the steps from its options to the runs and the written results."""

import argparse
import hashlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kfac_bench import report
from kfac_bench.benchmark import local_runs, slurm_jobs
from kfac_bench.benchmark.local_runs import warn_if_busy
from kfac_bench.benchmark.scaling import scaling_report
from kfac_bench.benchmark.scaling.measured import ScalingPoint, measure
from kfac_bench.benchmark.scaling.scaling_report import scaling_table, stage_table
from kfac_bench.benchmark.slurm_jobs import KFAC_BENCH
from kfac_bench.config import compose
from kfac_bench.config.command_options import path_word, whole_number
from kfac_bench.errors import UsageError
from kfac_bench.output import time_left
from kfac_bench.record.events import EVENTS_FILE, RunEnded, read
from kfac_bench.record.runs import Run, load
from kfac_bench.simulate import hardware
from kfac_bench.simulate.hardware import Hardware
from kfac_bench.simulate.sweep import SGD, Intervals, Variant, efficiency, sweep, variant
from kfac_bench.whole_files import write_text

_MOST_RANKS, _MOST_ROUNDS, _MOST_STEPS = 4096, 100, 1_000_000
WINDOWS = 4
"""Intervals of decompositions that a run trains. The first interval warms up."""
MOST_S = 3600
"""Time limit of one run."""


@dataclass(frozen=True)
class ScalingRun:
    """One round of one strategy on one number of ranks: one run of kfac-train."""

    variant: Variant
    world_size: int
    round: int
    overrides: tuple[str, ...]
    """Overrides of kfac-train, run_id and runs_dir included."""
    path: Path
    """The run directory."""

    @property
    def label(self) -> str:
        """The name for readers, which is also the name of the job."""
        return f"{self.variant.label} {self.world_size} ranks round {self.round + 1}"

    @property
    def local_command(self) -> list[str]:
        """The command that runs all ranks on this machine."""
        return local_runs.local_command(self.overrides, self.world_size)

    @property
    def rank_command(self) -> list[str]:
        """The command of one rank, for srun to start on every rank."""
        return local_runs.rank_command(self.overrides)

    def has_finished(self) -> bool:
        """Return whether the run is complete."""
        if not (self.path / EVENTS_FILE).exists():
            return False
        last = next((e for e in reversed(read(self.path)) if isinstance(e, RunEnded)), None)
        return last is not None and last.status == "finished"


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
    runs: Sequence[ScalingRun]
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
    failed = run_here(request.runs, say) if request.launcher == "local" else 0
    finished = [each for each in request.runs if each.has_finished()]
    if not finished:
        raise UsageError(f"{request.folder}: no run has finished; measure with --launcher local")
    _write(request, [load(each.path) for each in finished], say)
    return 1 if failed else 0


def _write(request: ScalingRequest, runs: Sequence[Run], say: Callable[[str], None]) -> None:
    """Write the tables, the figure and the page, and print the tables."""
    points = measure(runs)
    if not points:
        raise UsageError(
            f"{request.folder}: no run is long enough to measure a step; train without "
            "trainer.max_train_s, or use fewer --steps"
        )
    tables = [scaling_table(runs), stage_table(runs)]
    if missing := len(request.runs) - len(runs):
        note = f"missing: {missing} of {len(request.runs)} runs"
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

    config = compose.load(request.overrides)
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
        name = cell.variant.label if cell.variant.strategy != SGD else config.optimizer.name
        simulated.setdefault(name, {})[cell.world_size] = efficiency(cells, cell)
    return simulated


def _submit(request: ScalingRequest, say: Callable[[str], None]) -> None:
    """Submit a job for each unfinished run; the last job of each world size writes the results."""
    # The last --launcher counts.
    after = [sys.executable, *KFAC_BENCH, "scaling", *request.words, "--launcher", "none"]
    for world_size in request.world_sizes:
        todo = [r for r in request.runs if r.world_size == world_size and not r.has_finished()]
        commands = {each.label: each.rank_command for each in todo}
        if commands:
            options = [f"--ntasks={world_size}", *request.sbatch]
            jobs = slurm_jobs.submit(commands, after, request.folder, options)
            say(f"{world_size} ranks: jobs {jobs[0]} to {jobs[-1]}, the last writes the results")


def _request(options: argparse.Namespace, words: Sequence[str]) -> ScalingRequest:
    overrides, steps = options.overrides, options.steps
    _check_overrides(overrides)
    chosen = [variant(text) for text in options.strategy.split(",") if text != SGD]
    variants = list(dict.fromkeys([Variant(SGD), *chosen]))
    sizes = options.world_size.split(",")
    world_sizes = [whole_number("--world-size", text, _MOST_RANKS) for text in sizes]
    world_sizes = list(dict.fromkeys(world_sizes))
    runs = scaling_runs(
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
        [word for word in options.sbatch.split(",") if word],
        overrides,
        variants,
        world_sizes,
        runs,
        options.runs_dir,
        _machine(options.hardware),
    )


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuse the options that differ between the runs of a measurement."""
    for word in overrides:
        name = word.partition("=")[0]
        if name in ("kfac", "kfac.strategy", "kfac.grad_worker_fraction", "kfac.enabled"):
            raise UsageError(f"{word}: set --strategy instead; sgd is always measured too")
        if name == "from":
            raise UsageError(
                f"{word}: kfac-bench scaling reads no file of a run. Write the options of the run, "
                "such as model=resnet20"
            )
        if name in ("seed", "run_id", "resume"):
            raise UsageError(f"{word}: each run has its own {name}; set --rounds for more runs")


def _machine(name: str) -> Hardware | None:
    """Return the machine to simulate. A wrong name is reported before anything is measured."""
    from kfac_bench.simulate.simulate_options import hardware_path  # This import loads torch.

    return hardware.load(hardware_path(name, None)) if name else None


def scaling_runs(
    overrides: Sequence[str],
    variants: Sequence[Variant],
    world_sizes: Sequence[int],
    *,
    weak: bool,
    rounds: int,
    steps: int | None,
    runs_dir: str,
) -> list[ScalingRun]:
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
    runs = []
    for number in range(rounds):
        for world_size in world_sizes:
            batch = base.trainer.batch_size * (world_size if weak else 1)
            for each in variants:
                own = (*fixed, f"trainer.batch_size={batch}", *_kfac(each), f"seed={number}")
                runs.append(_run_of(each, world_size, number, own, runs_dir))
    return runs


def _fixed(window: int) -> list[str]:
    """Return the overrides that make every run measure alike, whatever an experiment file says."""
    return [
        "trainer.target=null",
        "trainer.max_epochs=null",
        f"trainer.max_steps={WINDOWS * window}",
        f"trainer.log_freq={window}",
        f"trainer.eval_freq={WINDOWS * window}",
        "trainer.predictions=0",
        f"trainer.checkpoint_freq={WINDOWS * window}",
        "trainer.pin=true",
        "trainer.time_stages=true",
        "logger=none",
    ]


def _run_of(
    variant: Variant, world_size: int, number: int, overrides: tuple[str, ...], runs_dir: str
) -> ScalingRun:
    config = compose.load(overrides)
    if config.trainer.batch_size < world_size:
        raise UsageError(
            f"trainer.batch_size={config.trainer.batch_size} leaves some of {world_size} ranks "
            "without an example; use --mode weak or a larger batch"
        )
    digest = hashlib.sha256(repr((world_size, overrides)).encode()).hexdigest()[:8]
    name = f"{variant.label.replace('/', '_').replace('@', '-')}-{world_size}-{number}-{digest}"
    named = (*overrides, f"run_id={name}")
    return ScalingRun(variant, world_size, number, named, Path(runs_dir) / name)


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


def run_here(todo: Sequence[ScalingRun], say: Callable[[str], None]) -> int:
    """Run all on this machine, one after the other; return how many failed.

    Finished runs are skipped. An interrupted run continues from its checkpoint.
    """
    failed = 0
    # Before the runs themselves make the machine busy.
    if not all(each.has_finished() for each in todo):
        warn_if_busy(say)
    took_s: list[float] = []
    for number, each in enumerate(todo, start=1):
        if each.has_finished():
            text = "measured before"
        else:
            began = time.monotonic()
            error = _run(each)
            took_s.append(time.monotonic() - began)
            failed += bool(error)
            text = error or "measured"
        left = sum(not later.has_finished() for later in todo[number:])
        say(f"[{number}/{len(todo)}] {each.label}: {text}{time_left(took_s, left)}")
    return failed


def _run(each: ScalingRun) -> str:
    """Run it; return the error, or an empty text."""
    try:
        code, line = local_runs.run_command(each.local_command, MOST_S)
    except subprocess.TimeoutExpired:
        return f"failed: not finished after {MOST_S} s"
    return "" if code == 0 and each.has_finished() else f"failed: {line}"
