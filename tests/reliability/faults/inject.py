"""A rank of `kfac-train` that meets a fault: one function is replaced before the rank starts.

Usage: `python -m tests.reliability.faults.inject '{"kind": "kill", ...}' OPTION=VALUE...`
"""

from __future__ import annotations

import ctypes
import json
import math
import multiprocessing
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfac_bench.core.execution.batch_statistics import BatchStatistics
from kfac_bench.core.kernels import linalg
from kfac_bench.core.planning.layer_spec import FACTORS
from kfac_bench.record.events import EVENTS_FILE
from kfac_bench.tasks.objectives.reconstruction import Reconstruction
from kfac_bench.training.checkpoint import MANIFEST, writing
from kfac_bench.training.trainer import Trainer
from kfac_bench.training.update import Update

STEP_S = 0.03
"""Least duration of a step."""
WRITES_STEPS, WRITES_S = 2, 20.0
"""A checkpoint is on disk at most this many steps after its start, as in runs with slow steps."""

MEET_S = 0.3
"""Time for other processes to receive a signal, and for their parent to notice their end."""

HAPPENED = "happened"
"""Name of a file that marks that the fault happened. A case without its fault proves nothing."""

_now = {"step": 0}
"""The number of the present update."""
_mark: list[Path] = []


def _happens() -> None:
    for path in _mark:
        path.touch()


def _each_step(action: Callable[[Trainer, int], None]) -> None:
    """Call `action` with the number of the update before each update."""
    original = Trainer._train_step

    def step(self: Trainer, batch: Any) -> None:
        _now["step"] = self.step + 1
        action(self, self.step + 1)
        original(self, batch)

    Trainer._train_step = step  # type: ignore[method-assign]


def _send(number: int, *, here: str | None = None, group: bool = False) -> Callable[[int], None]:
    """Return a function that installs a signal to this process.

    Args:
        number: The signal.
        here: Send the signal when this function of `_PLACES` is called, not before the update.
        group: Send the signal to the processes that this one has started too.
    """

    def send() -> None:
        _happens()
        if group:
            # As a batch system does: another process sends the signal, from outside the group.
            kill = ["kill", f"-{number}", "--", f"-{os.getpgid(0)}"]
            subprocess.run(kill, check=True, start_new_session=True)
            time.sleep(MEET_S)
        else:
            os.kill(os.getpid(), number)

    def install(step: int) -> None:
        if here is None:
            _each_step(lambda _, now: send() if now == step else None)
        else:
            _once(here, step, send)

    return install


_PLACES: dict[str, tuple[Any, str]] = {
    "evaluation": (Reconstruction, "totals"),
    "decomposition": (linalg, "eigendecompose"),
    "checkpoint": (writing, "_write_synced"),
    "commit": (writing, "sync_folder"),
}
"""Functions in which a fault can happen, by name."""


def _once(place: str, step: int, action: Callable[[], None]) -> None:
    """Call `action` once, when the function of `place` runs in update `step` or later."""
    owner, name = _PLACES[place]
    original = getattr(owner, name)
    done: list[int] = []

    def function(*arguments: Any, **keywords: Any) -> Any:
        if _now["step"] >= step and not done:
            done.append(step)
            action()
        return original(*arguments, **keywords)

    setattr(owner, name, function)


def _raise(step: int) -> None:
    def action(_: Trainer, now: int) -> None:
        if now == step:
            _happens()
            raise RuntimeError("an error of the program")

    _each_step(action)


def _nan_loss(step: int) -> None:
    original = Reconstruction.forward

    def forward(self: Reconstruction, *arguments: Any) -> tuple[Tensor, Tensor]:
        loss, output = original(self, *arguments)
        if _now["step"] == step:
            _happens()
            loss = loss * math.nan
        return loss, output

    Reconstruction.forward = forward  # type: ignore[method-assign, assignment]


def _nan_gradient(step: int) -> None:
    original = Update.backward

    def backward(self: Update, *arguments: Any) -> Tensor:
        loss = original(self, *arguments)
        if _now["step"] == step:
            _happens()
            self._optimizer.param_groups[0]["params"][0].grad.view(-1)[0] = math.nan
        return loss

    Update.backward = backward  # type: ignore[method-assign, assignment]


def _nan_statistic(step: int) -> None:
    """Put a NaN into the statistics of one batch for one factor."""
    original = BatchStatistics._only_finite
    done: list[int] = []

    def only_finite(
        self: BatchStatistics, moment: Tensor, samples: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        if _now["step"] >= step and not done:
            done.append(step)
            _happens()
            moment.view(-1)[0] = math.nan
        return original(self, moment, samples)

    BatchStatistics._only_finite = only_finite  # type: ignore[method-assign]


def _nan_factor(step: int) -> None:
    """Put a NaN into one running factor that this rank decomposes, as broken memory would."""

    def action(trainer: Trainer, now: int) -> None:
        if now == step and trainer.kfac is not None:
            _happens()
            run = trainer.kfac._executor
            own = next(
                (p.layer.name, f)
                for p in run.plan.placements
                for f in FACTORS
                if p.worker(f) == run.collective.rank
            )
            run.store.factors[own].matrix.view(-1)[0] = math.nan

    _each_step(action)


def _no_eigh(step: int) -> None:
    """Let LAPACK give up on one decomposition, in float64 too."""
    original, calls = torch.linalg.eigh, [0]

    def eigh(*arguments: Any) -> Any:
        # The first four calls are for the batch and then its first matrix, each in two precisions.
        if _now["step"] >= step and calls[0] < 4:
            calls[0] += 1
            _happens()
            raise torch.linalg.LinAlgError("eigh: did not converge")  # type: ignore[attr-defined]
        return original(*arguments)

    torch.linalg.eigh = eigh


def _kill_wandb(step: int) -> None:
    """Kill W&B's own process, which is a child of this process."""

    def action(_: Trainer, now: int) -> None:
        if now == step:
            for pid in _wandb_processes():
                _happens()
                os.kill(pid, signal.SIGKILL)

    _each_step(action)


def children(pid: int) -> list[int]:
    """Return the processes that this process has started, and those that they have started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    own = [int(child) for task in tasks for child in task.read_text().split()]
    return [*own, *(grandchild for child in own for grandchild in children(child))]


def _kill_worker() -> None:
    """Kill a loader worker of this process, as the kernel does if memory runs out."""
    for worker in multiprocessing.active_children()[:1]:
        _happens()
        os.kill(worker.pid or 0, signal.SIGKILL)
        time.sleep(MEET_S)


def _wandb_processes() -> list[int]:
    """Return W&B's own processes, which are children of this process."""
    return [
        pid
        for pid in children(os.getpid())
        if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


CHECKPOINT_STEPS = 6
"""Number of steps within which a run of a case writes a checkpoint."""


def _kill_with_wandb(step: int) -> None:
    """Kill W&B's process and this process, before W&B has written the points of some steps."""

    def action(_: Trainer, now: int) -> None:
        # A suspended process writes nothing. A checkpoint comes between the two moments, so the
        # next start does not make these points again.
        number = {step - CHECKPOINT_STEPS: signal.SIGSTOP, step: signal.SIGKILL}.get(now)
        if number is not None:
            for pid in _wandb_processes():
                _happens()
                os.kill(pid, number)
        if number == signal.SIGKILL:
            os.kill(os.getpid(), number)

    _each_step(action)


LITTLE_BYTES = 60_000
"""Room for the event file, but not for a checkpoint."""


def _fill_disk(leave: int, *, is_visible: bool = True) -> Callable[[int], None]:
    """Return a function that installs a full disk with `leave` free bytes.

    With `is_visible=False` the disk claims to have room, like a quota: only a write fails.
    """

    def install(step: int) -> None:
        def action(trainer: Trainer, now: int) -> None:
            if now == step:
                _happens()
                fill(trainer.directory.parent / FILLER, leave)

        _each_step(action)
        if not is_visible:
            usage = shutil.disk_usage
            shutil.disk_usage = lambda path: usage(path)._replace(free=1 << 40)

    return install


FILLER = "filler"


def fill(path: Path, leave: int) -> None:
    """Write a file that fills the disk except for `leave` bytes."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"\0" * 4096):
            pass
    with path.open("r+b") as file:
        file.truncate(max(0, path.stat().st_size - leave))


def _kill_before_event(step: int) -> None:
    """Kill this process when a checkpoint is complete and its event is not written yet."""
    original = Trainer._report_checkpoint

    def report(self: Trainer) -> None:
        if _now["step"] >= step and self._saving._writer._complete:
            _happens()
            os.kill(os.getpid(), signal.SIGKILL)
        original(self)

    Trainer._report_checkpoint = report  # type: ignore[method-assign]


SPARE_BYTES = 64 << 20
STACK_BYTES = 4 * SPARE_BYTES


def _at(step: int, action: Callable[[Trainer], None]) -> None:
    """Call `action` before this update."""

    def act(trainer: Trainer, now: int) -> None:
        if now == step:
            _happens()
            action(trainer)

    _each_step(act)


def _limit_memory() -> None:
    """Leave this process little new memory, as `ulimit -v` does."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, resource.RLIM_INFINITY))


def _no_memory(step: int) -> None:
    def action(_: Trainer) -> None:
        _limit_memory()
        torch.zeros(4 * SPARE_BYTES)

    _at(step, action)


def _no_threads(step: int) -> None:
    """Refuse new threads: the limit leaves no memory for their stacks."""

    def action(_: Trainer) -> None:
        threading.stack_size(STACK_BYTES)
        _limit_memory()

    _at(step, action)


INODES = 200
"""Names for which a small disk has room. A run needs fewer."""


def empty_files(folder: Path) -> None:
    """Make empty files until the disk has no room for another name."""
    folder.mkdir()
    with suppress(OSError):
        for number in range(1_000_000):
            (folder / str(number)).touch()


def _no_inodes(step: int) -> None:
    _at(step, lambda trainer: empty_files(trainer.directory.parent / FILLER))


def _no_shared_memory(step: int) -> None:
    """Give this process and its workers a /dev/shm of its own that has no room."""

    def action(_: Trainer) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEW_MOUNTS):
            raise OSError(ctypes.get_errno(), "unshare")
        # Without this the mount would reach all processes of the machine.
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "kfac", "/dev/shm"], check=True)
        fill(Path("/dev/shm") / FILLER, 0)

    _at(step, action)


NEW_MOUNTS = 0x20000
"""CLONE_NEWNS of unshare(2)."""


def _few_files(step: int) -> None:
    """Allow two more open files, as `ulimit -n` does."""

    def action(_: Trainer) -> None:
        most = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + 3, limit))

    _at(step, action)


def _remove_record(step: int) -> None:
    _at(step, lambda trainer: (trainer.directory / EVENTS_FILE).unlink())


SAVES_S = 3.0
"""Duration of a slow end, in which somebody gives the same command again."""


def _slow_term(step: int) -> None:
    """Send SIGTERM to this process, which then takes long to save."""
    original = Trainer._finish_saving

    def finish(self: Trainer) -> None:
        if _now["step"] >= step:
            time.sleep(SAVES_S)
        original(self)

    Trainer._finish_saving = finish  # type: ignore[method-assign]
    _send(signal.SIGTERM)(step)


def _hold_interpreter(step: int) -> None:
    """Hang in C code that does not release Python's interpreter."""
    _at(step, lambda _: ctypes.PyDLL(None).sleep(600))


INJECT: dict[str, Callable[[int], None]] = {
    "kill": _send(signal.SIGKILL),
    "kill worker": lambda step: _each_step(lambda _, now: _kill_worker() if now == step else None),
    "kill worker in evaluation": lambda step: _once("evaluation", step, _kill_worker),
    "kill with wandb": _kill_with_wandb,
    "kill in commit": _send(signal.SIGKILL, here="commit"),
    "kill before event": _kill_before_event,
    "no memory": _no_memory,
    "no threads": _no_threads,
    "no inodes": _no_inodes,
    "no shared memory": _no_shared_memory,
    "few files": _few_files,
    "remove record": _remove_record,
    "hold": _hold_interpreter,
    "term": _send(signal.SIGTERM),
    "hup": _send(signal.SIGHUP),
    "quit": _send(signal.SIGQUIT),
    "usr2": _send(signal.SIGUSR2),
    "slow term": _slow_term,
    "hup to all": _send(signal.SIGHUP, group=True),
    "quit to all": _send(signal.SIGQUIT, group=True),
    "usr2 to all": _send(signal.SIGUSR2, group=True),
    "term to all": _send(signal.SIGTERM, group=True),
    "term in evaluation": _send(signal.SIGTERM, here="evaluation"),
    "term in decomposition": _send(signal.SIGTERM, here="decomposition"),
    "term in checkpoint": _send(signal.SIGTERM, here="checkpoint"),
    "stop": _send(signal.SIGSTOP),
    "raise": _raise,
    "nan loss": _nan_loss,
    "nan gradient": _nan_gradient,
    "nan statistic": _nan_statistic,
    "nan factor": _nan_factor,
    "no eigh": _no_eigh,
    "kill wandb": _kill_wandb,
    "fill disk": _fill_disk(0),
    "fill disk but for little": _fill_disk(LITTLE_BYTES),
    "quota": _fill_disk(LITTLE_BYTES, is_visible=False),
}
"""The faults. Each function takes the number of the update at which the fault happens."""


def _slow_down(trainer: Trainer, now: int) -> None:
    """Let steps take as long as in a real run, where a checkpoint is soon on disk."""
    time.sleep(STEP_S)
    every = trainer.config.checkpoint_freq or now
    due = (now - 1) // every * every
    manifest = trainer.directory / "checkpoints" / f"step-{due:08d}" / MANIFEST
    deadline = time.monotonic() + WRITES_S
    saving = trainer._saving
    while due and now - due > WRITES_STEPS and not manifest.exists() and not saving.has_failed:
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def main(injected: dict[str, Any], options: list[str]) -> None:
    """Run `kfac-train` in this process, with the fault if it is meant for this rank.

    Args:
        injected: `{"kind": ..., "rank": ..., "step": ..., "mark": FILE}`. With `"once": true` the
            fault does not happen again in ranks that a launcher restarts.
        options: The options of `kfac-train`.
    """
    if injected and int(os.environ.get("RANK", "0")) == injected["rank"]:
        _mark.append(Path(injected["mark"]))
        if not (injected.get("once") and _mark[0].exists()):
            INJECT[injected["kind"]](injected["step"])
    # The last one installed is called first: wait before the fault happens.
    _each_step(_slow_down)
    sys.argv = ["kfac-train", *options]
    runpy.run_module("kfac_bench", run_name="__main__")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
