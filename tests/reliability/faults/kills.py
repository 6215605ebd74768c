"""Signals and kills: how a rank meets the end of itself, of its workers or of W&B's process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from kfac_bench.training.trainer import Trainer
from tests.reliability.faults.hooks import MEET_S, each_step, happens, marks, once, update


def send(number: int, *, here: str | None = None, group: bool = False) -> Callable[[int], None]:
    """Return a function that installs a signal to this process.

    Args:
        number: The signal.
        here: Send the signal when this function of `PLACES` is called, not before the update.
        group: Send the signal to the processes that this one has started too.
    """

    def deliver() -> None:
        happens()
        if group:
            # As a batch system does: another process sends the signal, from outside the group.
            kill = ["kill", f"-{number}", "--", f"-{os.getpgid(0)}"]
            subprocess.run(kill, check=True, start_new_session=True)
            time.sleep(MEET_S)
        else:
            os.kill(os.getpid(), number)

    def install(step: int) -> None:
        if here is None:
            each_step(lambda _, now: deliver() if now == step else None)
        else:
            once(here, step, deliver)

    return install


def kill_before_event(step: int) -> None:
    """Kill this process when a checkpoint is complete and its event is not written yet."""
    original = Trainer._report_checkpoint

    def report(self: Trainer) -> None:
        if update["step"] >= step and self._saving._complete:
            happens()
            os.kill(os.getpid(), signal.SIGKILL)
        original(self)

    Trainer._report_checkpoint = report  # type: ignore[method-assign]


def children(pid: int) -> list[int]:
    """Return the processes that this process has started, and those that they have started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    own = [int(child) for task in tasks for child in task.read_text().split()]
    return [*own, *(grandchild for child in own for grandchild in children(child))]


def kill_worker() -> None:
    """Kill a loader worker of this process, as the kernel does if memory runs out."""
    for worker in multiprocessing.active_children()[:1]:
        happens()
        os.kill(worker.pid or 0, signal.SIGKILL)
        time.sleep(MEET_S)


def _wandb_processes() -> list[int]:
    """Return W&B's own processes, which are children of this process."""
    return [
        pid
        for pid in children(os.getpid())
        if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def kill_wandb(step: int) -> None:
    """Kill W&B's own process, which is a child of this process."""

    def action(_: Trainer, now: int) -> None:
        if now == step:
            for pid in _wandb_processes():
                happens()
                os.kill(pid, signal.SIGKILL)

    each_step(action)


CHECKPOINT_STEPS = 6
"""Number of steps within which a run of a case writes a checkpoint."""


def kill_with_wandb(step: int) -> None:
    """Kill W&B's process and this process, before W&B has written the points of some steps."""

    def action(_: Trainer, now: int) -> None:
        # A suspended process writes nothing. A checkpoint comes between the two moments, so the
        # next start does not make these points again.
        number = {step - CHECKPOINT_STEPS: signal.SIGSTOP, step: signal.SIGKILL}.get(now)
        if number is not None:
            for pid in _wandb_processes():
                happens()
                os.kill(pid, number)
        if number == signal.SIGKILL:
            os.kill(os.getpid(), number)

    each_step(action)


MOST_S = 60.0
"""Most seconds of a slow end."""


def slow_term(step: int) -> None:
    """Send SIGTERM to this process, which then saves only when `may_save` exists."""
    original = Trainer._finish_saving

    def finish(self: Trainer) -> None:
        deadline = time.monotonic() + MOST_S
        while update["step"] >= step and not may_save(marks[0]).exists():
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        original(self)

    Trainer._finish_saving = finish  # type: ignore[method-assign]
    send(signal.SIGTERM)(step)


def may_save(mark: Path) -> Path:
    """Return the file that lets a slow end go on, for the fault with this mark."""
    return mark.with_suffix(".go")
