"""A case: one run that meets a fault, is started again, and is examined."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kfac_bench.errors import UsageError
from kfac_bench.record.events import EVENTS_FILE, Checkpointed, RunEnded, read
from tests.reliability.faults import hooks, launch
from tests.reliability.faults.launch import Ended

CHECKPOINT_FREQ, STEPS = 4, 12
BASE = (
    "model=autoencoder",
    "model.hidden=[16,6]",
    "optimizer.lr=0.05",
    "trainer.threads=1",
    f"trainer.max_steps={STEPS}",
    "trainer.log_freq=1",
    "trainer.eval_freq=6",
    f"trainer.checkpoint_freq={CHECKPOINT_FREQ}",
    "trainer.predictions=0",
    "run_id=run",
    "backend.timeout_s=60",
)
"""A small autoencoder on real digits: five steps make an epoch."""

KFAC = ("kfac.method=eigen", "kfac.update_freq=4", "kfac.factor_update_freq=2")
STRATEGIES = (
    "comm_opt",
    "layer_wise",
    "mem_opt",
    "hybrid_opt",
    "owner_reduce",
    "local_factors",
)
METHODS: dict[str, tuple[str, ...]] = {
    "SGD": ("kfac=none",),
    **{strategy: (f"kfac={strategy}", *KFAC) for strategy in STRATEGIES},
}


@dataclass
class Case:
    """A run of `method` on `ranks` ranks. All its files are in `folder`."""

    folder: Path
    ranks: int
    method: str
    more: tuple[str, ...] = ()
    """Further options, which the fault needs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    launches: list[Ended] = field(default_factory=list)
    marks: list[Path] = field(default_factory=list)

    @property
    def options(self) -> tuple[str, ...]:
        """The options of `kfac-train`."""
        logger = () if any(o.startswith("logger=") for o in self.more) else ("logger=none",)
        where = f"runs_dir={self.folder / 'runs'}"
        return (*BASE, *METHODS[self.method], *logger, *self.more, where)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.folder / "runs" / "run"

    @property
    def events(self) -> Path:
        """The event file."""
        return self.path / EVENTS_FILE

    def start(
        self,
        kind: str | None = None,
        step: int = 7,
        rank: int = 0,
        meanwhile: Callable[[list[int]], None] = lambda pids: None,
    ) -> Ended:
        """Start the run's command, with a fault of this kind if one is named."""
        injected = None if kind is None else self.injection(kind, step, rank)
        ended = launch.by_hand(
            self.folder,
            self.ranks,
            self.options,
            injected,
            self.environment,
            self.events,
            meanwhile,
        )
        self.launches.append(ended)
        return ended

    def injection(self, kind: str, step: int, rank: int, **more: Any) -> dict[str, Any]:
        """Return the argument of `inject.py` for a fault. `missed` checks that it happened."""
        mark = self.folder / f"{hooks.HAPPENED}{len(self.marks)}"
        self.marks.append(mark)
        return {"kind": kind, "rank": rank, "step": step, "mark": str(mark), **more}

    def missed(self) -> bool:
        """Return whether an injected fault did not happen."""
        return not all(mark.exists() for mark in self.marks)

    def status(self) -> str | None:
        """Return how the run ended, or None if it has not ended."""
        try:
            ended = [e for e in read(self.events) if isinstance(e, RunEnded)]
        except UsageError:
            return None
        return ended[-1].status if ended else None

    def checkpoints(self) -> list[Path]:
        """Return the complete checkpoints in the order of their steps."""
        return sorted(p.parent for p in self.path.glob("checkpoints/step-*/manifest.json"))

    def without_event(self) -> list[int]:
        """Return the steps of the complete checkpoints that the record does not name."""
        named = {e.step for e in read(self.events) if isinstance(e, Checkpointed)}
        return [s for p in self.checkpoints() if (s := int(p.name[len("step-") :])) not in named]

    def weights(self) -> str | None:
        """Return the hash of the final weights, if the run has reached its end."""
        if self.status() not in ("finished", "reached"):
            return None
        ended = [e for e in read(self.events) if isinstance(e, RunEnded)]
        return ended[-1].weights_sha256

    def lost_steps(self) -> int:
        """Return how many steps were done more than once, by the lines of the event file."""
        lost, last = 0, 0
        for event in _raw(self.events):
            if event.get("event") in ("Resumed", "RunStarted"):
                lost += max(0, last - int(event["step"]))
                last = int(event["step"])
            elif event.get("event") == "Trained":
                last = int(event["step"])
        return lost

    def said(self) -> str:
        """Return the most telling line of the output: the cause, not the loss of another rank."""
        lines = []
        for ended in self.launches:
            lines += [x for x in ended.errors.splitlines() if x.startswith("kfac-train: ")]
            lines += [x for x in ended.out.splitlines() if re.match(_TELLING, x)]
        lines.sort(key=lambda line: "lost another rank" in line)
        return lines[0].replace(f"{self.folder}/", "") if lines else ""

    def traceback(self) -> bool:
        """Return whether a rank ended with a traceback."""
        return any("Traceback (most recent" in e.errors + e.out for e in self.launches)

    def mounted(self, size: str, options: Sequence[str] = ()) -> bool:
        """Mount a small disk for the runs. Return False if this process may not mount."""
        where = self.folder / "runs"
        where.mkdir(exist_ok=True)
        how = ",".join([f"size={size}", *options])
        command = ["mount", "-t", "tmpfs", "-o", how, "kfac", str(where)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def remount(self, *options: str) -> None:
        """Change the options of the small disk."""
        where = str(self.folder / "runs")
        subprocess.run(["mount", "-o", ",".join(["remount", *options]), where], check=True)


_TELLING = (
    r"failed at step|W&B (failed|'s offline)|.*(damaged|no checkpoint) \(|left out:|"
    r"the data changed since|.*an event marks|.*another process still runs"
)
"""Telling lines of the console."""


def _raw(path: Path) -> list[dict[str, Any]]:
    events = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events
