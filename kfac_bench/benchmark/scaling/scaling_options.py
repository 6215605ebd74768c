"""``kfac-bench scaling``: what the words of its command line mean."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kfac_bench import report
from kfac_bench.benchmark import slurm_submit
from kfac_bench.benchmark.scaling import cells, scaling_figure
from kfac_bench.benchmark.scaling.cells import ScalingRun
from kfac_bench.benchmark.scaling.measured import measure
from kfac_bench.benchmark.scaling.scaling_tables import scaling_table, stage_table
from kfac_bench.config import compose
from kfac_bench.errors import UsageError
from kfac_bench.record.events import EVENTS_FILE
from kfac_bench.record.runs import Run, load
from kfac_bench.report.tables import Table
from kfac_bench.simulate import hardware
from kfac_bench.simulate.hardware import Hardware
from kfac_bench.simulate.sweep import SGD, Intervals, Variant, efficiency, sweep, variant

USAGE = """\
usage: kfac-bench scaling [world_size=N,N...] [GROUP=NAME | OPTION=VALUE]...

Train the same on several numbers of ranks, with each strategy and with the optimizer alone, and say
how a step scales and where its time goes. What was measured before is not run again. Other options
are those of kfac-train.

  kfac-bench scaling model=resnet20 data=cifar10 world_size=1,2 strategy=comm_opt,layer_wise

  world_size=1,2     numbers of ranks, of this machine
  mode=weak|strong   weak: trainer.batch_size is that of a rank; strong: that of all (weak)
  strategy=comm_opt,layer_wise    or hybrid_opt@1/2 (its fraction); sgd is always beside them
  rounds=3           of all runs, one after the other; the table has medians
  steps=N            of a window (kfac.update_freq); a run has four, the first warms up
  runs_dir=DIR       where runs and results go (runs/scaling)
  launcher=local     slurm submits jobs, that write the results too; none: of what is there already
  sbatch=--partition=gpu,--time=10    options of each job
  hardware=NAME      simulated efficiencies beside the measured, as in kfac-plan simulate
  --help

Results: DIR/scaling.md, DIR/scaling.svg and the page DIR/scaling.html.
"""

_OWN = {
    "world_size": "1,2",
    "mode": "weak",
    "strategy": "comm_opt,layer_wise",
    "rounds": "3",
    "steps": "",
    "runs_dir": "runs/scaling",
    "launcher": "local",
    "sbatch": "",
    "hardware": "",
}
_MOST_RANKS, _MOST_ROUNDS, _MOST_STEPS = 4096, 100, 1_000_000


@dataclass(frozen=True)
class ScalingRequest:
    """What was asked."""

    words: Sequence[str]
    own: dict[str, str]
    overrides: list[str]
    variants: list[Variant]
    world_sizes: list[int]
    cells: list[ScalingRun]
    machine: Hardware | None
    """To be simulated."""

    @property
    def folder(self) -> Path:
        """Of the runs and results."""
        return Path(self.own["runs_dir"])


def scaling(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Do it; the exit code: 1 if a run failed. Raises :class:`UsageError`."""
    asked = _parse(words)
    if asked.own["launcher"] == "slurm":
        _submit(asked, say)
        return 0
    failed = cells.run(asked.cells, say) if asked.own["launcher"] == "local" else 0
    there = [c for c in asked.cells if (c.path / EVENTS_FILE).exists() and c.ended()]
    if not there:
        raise UsageError(f"{asked.folder}: none of these runs has ended: nothing to show")
    _write(asked, [load(cell.path) for cell in there], len(asked.cells) - len(there), say)
    return 1 if failed else 0


def _write(
    asked: ScalingRequest, runs: Sequence[Run], lacking: int, say: Callable[[str], None]
) -> None:
    """Tables, Markdown, the figure and the page."""
    found = [scaling_table(runs), stage_table(runs)]
    if lacking:
        found[0] = _with_note(found[0], f"missing: {lacking} of {len(asked.cells)} runs")
    for table in found:
        say(table.markdown())
    points = measure(runs)
    title = f"{asked.own['mode']} scaling{found[0].title.partition(':')[2] and ':'}"
    title += found[0].title.partition(":")[2]
    machine = asked.machine
    simulated = {} if machine is None else _simulated(asked, machine)
    drawn = scaling_figure.svg(points, title, simulated, f"simulated, {asked.own['hardware']}")
    for name, text in (
        ("scaling.md", "\n".join(table.markdown() for table in found)),
        ("scaling.svg", drawn),
    ):
        path = asked.folder / name
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
        say(str(path))
    page = asked.folder / "scaling.html"
    report.compare([run.path for run in runs], page, found, title)
    say(str(page))


def _simulated(asked: ScalingRequest, machine: Hardware) -> scaling_figure.Simulated:
    """Efficiencies of the same steps on a model of the machine."""
    from kfac_bench.simulate import workload  # torch

    config = compose.load(asked.overrides)
    found = []
    intervals = Intervals(config.kfac.factor_update_freq, config.kfac.update_freq)
    for ranks in asked.world_sizes:
        size = config.trainer.batch_size
        if asked.own["mode"] == "strong":
            size = max(1, size // ranks)
        each = replace(config, trainer=replace(config.trainer, batch_size=size))
        work = workload.of_config(each)
        method, itemsize = config.kfac.method, workload.state_bytes(config)
        found += sweep(work, machine, asked.variants, [ranks], intervals, method, itemsize=itemsize)
    out: dict[str, dict[int, float]] = {}
    for cell in found:
        name = cell.variant.label if cell.variant.strategy != SGD else config.optimizer.name
        out.setdefault(name, {})[cell.world_size] = efficiency(found, cell)
    return out


def _submit(asked: ScalingRequest, say: Callable[[str], None]) -> None:
    """A job for each run that has not ended; the last of each world size writes the results."""
    again = [w for w in asked.words if not w.startswith("launcher=")]
    entry = "from kfac_bench.cli import bench; bench()"
    after = [sys.executable, "-c", entry, "scaling", *again, "launcher=none"]
    options = [word for word in asked.own["sbatch"].split(",") if word]
    for world_size in asked.world_sizes:
        todo = [c for c in asked.cells if c.world_size == world_size and not c.ended()]
        commands = {c.label: c.rank_command for c in todo}
        if commands:
            ntasks = [f"--ntasks={world_size}", *options]
            jobs = slurm_submit.submit(commands, after, asked.folder, ntasks)
            say(f"{world_size} ranks: jobs {jobs[0]} to {jobs[-1]}, the last writes the results")


def _parse(words: Sequence[str]) -> ScalingRequest:
    own, overrides = dict(_OWN), []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name in own:
            own[name] = value
        else:
            overrides.append(word)
    for name, choices in (("mode", ("weak", "strong")), ("launcher", ("local", "slurm", "none"))):
        if own[name] not in choices:
            raise UsageError(f"{name}={own[name]}: choose one of {', '.join(choices)}")
    for word in overrides:
        name = word.partition("=")[0]
        if name in ("kfac", "kfac.strategy", "kfac.grad_worker_fraction", "kfac.enabled"):
            raise UsageError(f"{word}: say strategy=, beside which sgd is always measured")
        if name in ("seed", "run_id", "resume"):
            raise UsageError(f"{word}: each run has its own; rounds= says how many there are")
    chosen = [variant(text) for text in own["strategy"].split(",") if text != SGD]
    variants = list(dict.fromkeys([Variant(SGD), *chosen]))
    sizes = [_whole("world_size", text, _MOST_RANKS) for text in own["world_size"].split(",")]
    made = cells.cells(
        overrides,
        variants,
        list(dict.fromkeys(sizes)),
        weak=own["mode"] == "weak",
        rounds=_whole("rounds", own["rounds"], _MOST_ROUNDS),
        steps=_whole("steps", own["steps"], _MOST_STEPS) if own["steps"] else None,
        runs_dir=own["runs_dir"],
    )
    return ScalingRequest(
        words, own, overrides, variants, list(dict.fromkeys(sizes)), made, _machine(own["hardware"])
    )


def _machine(name: str) -> Hardware | None:
    """Before anything is measured."""
    from kfac_bench.simulate.simulate_options import hardware_path  # torch

    return hardware.load(hardware_path(name, None)) if name else None


def _whole(name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
        raise UsageError(f"{name}={text}: expected a whole number from 1 to {most}")
    return int(text)


def _with_note(table: Table, note: str) -> Table:
    return Table(table.title, table.columns, table.rows, (note, *table.notes))
