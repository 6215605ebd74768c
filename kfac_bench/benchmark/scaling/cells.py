"""The runs of a scaling measurement: commands of kfac-train, as many ranks each as it says."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kfac_bench.config import compose
from kfac_bench.counted import time_left
from kfac_bench.errors import UsageError
from kfac_bench.record.events import EVENTS_FILE, RunEnded, read
from kfac_bench.simulate.sweep import SGD, Variant

WINDOWS = 4
"""Intervals of decompositions that a run trains; the first warms up."""
MOST_S = 3600
"""For one run."""


@dataclass(frozen=True)
class ScalingRun:
    """One round of one strategy on one number of ranks: one run of kfac-train."""

    variant: Variant
    world_size: int
    round: int
    overrides: tuple[str, ...]
    """Of kfac-train, run_id and runs_dir among them."""
    path: Path
    """Its run directory."""

    @property
    def label(self) -> str:
        """For people, and the name of its job."""
        return f"{self.variant.label} {self.world_size} ranks round {self.round + 1}"

    @property
    def local_command(self) -> list[str]:
        """Starts it on this machine."""
        launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.world_size}"]
        several = [*launch, "-m"] if self.world_size > 1 else []
        return [sys.executable, "-m", *several, "kfac_bench", *self.overrides]

    @property
    def rank_command(self) -> list[str]:
        """What srun starts on each rank."""
        return [sys.executable, "-m", "kfac_bench", *self.overrides]

    def ended(self) -> bool:
        """Whether nothing is left to do."""
        if not (self.path / EVENTS_FILE).exists():
            return False
        last = next((e for e in reversed(read(self.path)) if isinstance(e, RunEnded)), None)
        return last is not None and last.status == "finished"


def cells(
    overrides: Sequence[str],
    variants: Sequence[Variant],
    world_sizes: Sequence[int],
    *,
    weak: bool,
    rounds: int,
    steps: int | None,
    runs_dir: str,
) -> list[ScalingRun]:
    """Every strategy on every number of ranks, SGD beside them, in rounds.

    Rounds are the outer loop: a slow minute of the machine slows all of them. ``weak``: the
    configured batch is that of one rank, else that of all. Raises :class:`UsageError`.
    """
    base = compose.load(overrides)
    window = steps or base.kfac.update_freq
    fixed = [
        *overrides,
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
        f"runs_dir={runs_dir}",
    ]
    if base.trainer.threads is None:
        fixed.append("trainer.threads=1")
    found = []
    for number in range(rounds):
        for world_size in world_sizes:
            batch = base.trainer.batch_size * (world_size if weak else 1)
            for variant in variants:
                own = (*fixed, f"trainer.batch_size={batch}", *_kfac(variant), f"seed={number}")
                found.append(_cell(variant, world_size, number, own, runs_dir))
    return found


def _cell(
    variant: Variant, world_size: int, number: int, overrides: tuple[str, ...], runs_dir: str
) -> ScalingRun:
    config = compose.load(overrides)
    if config.trainer.batch_size < world_size:
        raise UsageError(
            f"trainer.batch_size={config.trainer.batch_size} leaves some of {world_size} ranks "
            "without an example: mode=weak, or a larger batch"
        )
    digest = hashlib.sha256(repr((world_size, overrides)).encode()).hexdigest()[:8]
    name = f"{variant.label.replace('/', '_').replace('@', '-')}-{world_size}-{number}-{digest}"
    return ScalingRun(
        variant, world_size, number, (*overrides, f"run_id={name}"), Path(runs_dir) / name
    )


def _kfac(variant: Variant) -> tuple[str, ...]:
    if variant.strategy == SGD:
        return ("kfac=none", "kfac.enabled=false")
    share = "null" if variant.fraction is None else f"{variant.fraction:g}"
    return (
        f"kfac={variant.strategy}",
        "kfac.enabled=true",
        f"kfac.strategy={variant.strategy}",
        f"kfac.grad_worker_fraction={share}",
    )


def run(todo: Sequence[ScalingRun], say: Callable[[str], None]) -> int:
    """Run the cells on this machine, one after the other; how many failed. Ended ones are skipped.

    A run that was broken off goes on where its checkpoint was.
    """
    failed = 0
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > 0.3 * cores and not all(cell.ended() for cell in todo):
        say(f"other processes take part: load {load:.1f} on {cores} cores, before anything is run")
    took_s: list[float] = []
    for number, cell in enumerate(todo, start=1):
        if cell.ended():
            said = "measured before"
        else:
            began = time.monotonic()
            error = _run(cell)
            took_s.append(time.monotonic() - began)
            failed += bool(error)
            said = error or "measured"
        left = sum(not each.ended() for each in todo[number:])
        say(f"[{number}/{len(todo)}] {cell.label}: {said}{time_left(took_s, left)}")
    return failed


def _run(cell: ScalingRun) -> str:
    """Run it; what went wrong."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(  # noqa: S603
            cell.local_command, capture_output=True, text=True, env=environment, timeout=MOST_S
        )
    except subprocess.TimeoutExpired:
        return f"failed: not ended after {MOST_S} s"
    if done.returncode == 0 and cell.ended():
        return ""
    own = [line for line in done.stderr.splitlines() if line.startswith("kfac-train:")]
    lines = own or done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or ["?"]
    return f"failed: {lines[-1]} (exit code {done.returncode})"
