"""The soak run: train for long, watch the processes meanwhile, and check the events afterwards."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from kfac_bench.config import compose
from kfac_bench.errors import UsageError
from kfac_bench.record.events import EVENTS_FILE, read
from kfac_bench.record.sinks.view import metrics_of
from tests.reliability.soak import processes
from tests.reliability.soak.processes import Sample
from tests.reliability.soak.verdict import Verdict

SAMPLE_S = 0.5
LOOKS = 20
"""Number of evaluations, and of checkpoints, of a run of so many steps."""
LOOK_STEPS = 100
"""Steps between evaluations, and between checkpoints, of a run of so many minutes."""
UNLIMITED = 10**9
STOP_S = 60.0
SMALL = (
    "data=digits",
    "model=resnet8",
    "kfac=comm_opt",
    "kfac.update_freq=10",
    "kfac.factor_update_freq=5",
    "optimizer.lr=0.02",
    "trainer.batch_size=64",
    "trainer.log_freq=10",
    "trainer.threads=1",
    "trainer.watchdog_s=300",
    "logger=wandb",
    "logger.mode=offline",
)
"""The default options of the run. The command line may change them."""


@dataclass(frozen=True)
class Soak:
    """The settings of a soak run on ranks of this machine, which ends after steps or minutes."""

    ranks: int
    runs_dir: Path
    steps: int = UNLIMITED
    minutes: float | None = None
    """Training time; it is checked at each evaluation."""
    overrides: Sequence[str] = ()

    @property
    def length(self) -> str:
        """The length of the run in words."""
        return f"{self.steps:,} steps" if self.minutes is None else f"{self.minutes:g} minutes"

    @property
    def path(self) -> Path:
        """The run directory."""
        length = self.steps if self.minutes is None else f"{self.minutes:g}min"
        return self.runs_dir / f"soak-{length}-{self.ranks}"

    @property
    def look_freq(self) -> int:
        """Steps between evaluations, and between checkpoints."""
        return max(1, self.steps // LOOKS) if self.minutes is None else LOOK_STEPS

    @property
    def options(self) -> list[str]:
        """The options of kfac-train."""
        freq = self.look_freq
        return [
            *SMALL,
            *self.overrides,
            f"trainer.max_steps={self.steps}",
            "trainer.max_epochs=null",
            f"trainer.max_train_s={'null' if self.minutes is None else 60 * self.minutes}",
            "trainer.target=null",
            "trainer.predictions=0",
            f"trainer.eval_freq={freq}",
            f"trainer.checkpoint_freq={freq}",
            "trainer.check_ranks=true",
            f"runs_dir={self.runs_dir}",
            f"run_id={self.path.name}",
        ]

    @property
    def command(self) -> list[str]:
        """The command that starts the run."""
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [sys.executable, *launch, "-m", "kfac_bench", *self.options]


def soak(asked: Soak, say: Callable[[str], None]) -> Verdict:
    """Run to the end and judge. The output and the samples go beside the run directory.

    Raises:
        UsageError: If the run cannot begin, or ends without events.
    """
    config = compose.load(asked.options)
    if not processes.PROC.is_dir():
        raise UsageError("python -m tests.reliability.soak needs /proc: run it on Linux")
    if asked.path.exists():
        raise UsageError(f"{asked.path} exists already; delete it, or set --runs-dir")
    say(f"{asked.length} on {asked.ranks} ranks; events: {asked.path / EVENTS_FILE}")
    log = asked.runs_dir / f"{asked.path.name}.log"
    samples, finish_s = watch(asked.command, asked.path / EVENTS_FILE, log)
    if not (asked.path / EVENTS_FILE).exists():
        raise UsageError(f"the run wrote no events: see {log}")
    _write(samples, asked.runs_dir / f"{asked.path.name}.csv")
    events = read(asked.path)
    verdict = Verdict()
    verdict.samples(samples)
    steps = asked.steps if asked.minutes is None else max(event.step for event in events)
    trained = -(-steps // config.trainer.log_freq)
    verdict.record(events, trained, 1 + -(-steps // asked.look_freq))
    if config.logger.wandb:
        from tests.support import wandb_rows

        rows = sum("step" in row for row in wandb_rows.offline(asked.path))
        verdict.view(rows, sum(bool(metrics_of(e)) for e in events), finish_s)
    return verdict


def watch(command: Sequence[str], events: Path, log: Path) -> tuple[list[Sample], float]:
    """Sample the ranks that `command` starts, and their run directory, until the command ends.

    The output goes to `log`.

    Returns:
        The samples, and the seconds from the last event to the end.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    samples: list[Sample] = []
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        follow = Follow(events)
        try:
            while process.poll() is None:
                step = follow.step()
                samples += processes.sample(process.pid, step)
                samples += processes.sample_disk(events.parent, step)
                time.sleep(SAMPLE_S)
        finally:
            # The loop ends early if somebody interrupts the soak test.
            if process.poll() is None:
                process.terminate()
                process.wait(STOP_S)
    return samples, time.time() - events.stat().st_mtime if events.exists() else 0.0


def _write(samples: Sequence[Sample], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Sample))
        writer.writerows(map(astuple, samples))


class Follow:
    """A reader of the last step in an event file that grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._step = path, 0, 0

    def step(self) -> int:
        """Return the last step of the complete lines so far."""
        if not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._step = max(self._step, int(json.loads(line)["step"]))
        return self._step
