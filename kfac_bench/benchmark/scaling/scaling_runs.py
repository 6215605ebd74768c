"""The runs of a scaling measurement: each is a command of kfac-train on some number of ranks."""

import hashlib
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kfac_bench.benchmark import local_runs
from kfac_bench.benchmark.local_runs import warn_if_busy
from kfac_bench.config import compose
from kfac_bench.config.command_options import path_word
from kfac_bench.errors import UsageError
from kfac_bench.output import time_left
from kfac_bench.record.events import EVENTS_FILE, RunEnded, read
from kfac_bench.simulate.sweep import SGD, Variant

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
            for variant in variants:
                own = (*fixed, f"trainer.batch_size={batch}", *_kfac(variant), f"seed={number}")
                runs.append(_run_of(variant, world_size, number, own, runs_dir))
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
