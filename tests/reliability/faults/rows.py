"""The faults: what happens to a run, and how the run must end."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.reliability.faults import launch
from tests.reliability.faults.case import CHECKPOINT_FREQ, Case
from tests.reliability.faults.fault import AT, KEEP_ALL, WORKERS, Fault, mount, starts, wait_until
from tests.reliability.faults.restart_rows import ROWS as RESTART_ROWS
from tests.reliability.faults.shortages import FILLER, INODES
from tests.reliability.faults.worker_rows import ROWS as WORKER_ROWS

WATCHDOG_S = 4.0


def _requeued_twice(case: Case) -> None:
    case.start("term", 3)
    case.start("term", 9, case.ranks - 1)


def _stopped(case: Case) -> None:
    """Suspend a rank. A single process continues after a while, one of two never does."""

    def meanwhile(pids: list[int]) -> None:
        deadline = time.monotonic() + launch.ENDS_S
        while Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            if time.monotonic() > deadline:
                raise TimeoutError("the process did not stop")
            time.sleep(0.01)
        time.sleep(1.5 * WATCHDOG_S)
        os.kill(pids[0], signal.SIGCONT)

    if case.ranks == 1:
        case.start("stop", AT, meanwhile=meanwhile)
    else:
        case.start("stop", AT, case.ranks - 1)


def _damaged(damage: Callable[[Path], None]) -> Callable[[Case], None]:
    """Return an action that kills the run and damages its newest checkpoint."""

    def act(case: Case) -> None:
        case.start("kill", 11)
        damage(case.checkpoints()[-1])

    return act


def _flip(path: Path) -> None:
    data = bytearray((path / "rank0.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "rank0.pt").write_bytes(data)


def _zero(path: Path) -> None:
    with (path / "rank0.pt").open("r+b") as file:
        file.seek(4096)
        file.write(b"\0" * 512)


def _truncate(path: Path) -> None:
    file = path / "rank0.pt"
    os.truncate(file, file.stat().st_size // 2)


def _without_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def _full(kind: str) -> Callable[[Case], None]:
    """Return an action that fills the run's own disk, and empties it before the run continues."""

    def act(case: Case) -> None:
        mount(case)
        case.start(kind, 6)
        (case.path.parent / FILLER).unlink()

    return act


def _no_inodes(case: Case) -> None:
    mount(case, [f"nr_inodes={INODES}"])
    case.start("no inodes", 6)
    shutil.rmtree(case.path.parent / FILLER)


def _read_only(case: Case) -> None:
    mount(case, ["ro"])
    case.start()
    case.remount("rw")


def _wandb_unreachable(case: Case) -> None:
    case.environment = {
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": "0" * 40,
        "WANDB_CONFIG_DIR": str(case.folder),
    }
    case.start()


def _wandb_killed(case: Case) -> None:
    case.environment = {"WANDB_MODE": "offline", "WANDB_CONFIG_DIR": str(case.folder)}
    case.start("kill wandb")


def _torchrun(case: Case, meanwhile: Callable[[int], float], *flags: str) -> None:
    case.launches.append(
        launch.torchrun(case.folder, case.ranks, case.options, meanwhile, flags=flags)
    )


def _signalled(number: int, *flags: str) -> Callable[[Case], None]:
    """Return an action that sends a signal to torchrun once a checkpoint exists."""

    def act(case: Case) -> None:
        def meanwhile(agent: int) -> float:
            wait_until(lambda: bool(case.checkpoints()))
            os.kill(agent, number)
            return 0.0

        _torchrun(case, meanwhile, *flags)
        if number == signal.SIGKILL:
            # The ranks lost their launcher. They end by themselves and release the run's lock.
            wait_until(lambda: case.status() is not None)
            time.sleep(0.5)

    return act


def _restarted(case: Case) -> None:
    """Kill a rank and let torchrun restart all ranks."""
    injected = case.injection("kill", AT, case.ranks - 1, once=True)

    def meanwhile(agent: int) -> float:
        wait_until(case.marks[0].exists)
        return launch.seconds_to_a_new_step(case.events, launch.size_of(case.events))

    case.launches.append(
        launch.torchrun(
            case.folder, case.ranks, case.options, meanwhile, injected, ["--max-restarts", "1"]
        )
    )


LONGER = ("trainer.max_steps=40",)
"""Some seconds, for signals that come from outside."""
USR1 = ("--signals-to-handle", "SIGUSR1,SIGTERM,SIGINT")

ROWS = (
    Fault("SIGKILL of rank 0", starts("kill", last=False)),
    Fault("SIGKILL of another rank", starts("kill"), ranks=(2,)),
    Fault("SIGKILL of a rank, torchrun restarts", _restarted),
    Fault("SIGKILL of torchrun", _signalled(signal.SIGKILL), options=LONGER),
    Fault(
        "SIGKILL while a checkpoint is committed",
        starts("kill in commit", last=False),
        # The checkpoint that was being written is lost too.
        lost=2 * CHECKPOINT_FREQ,
    ),
    Fault(
        "SIGKILL between a checkpoint's commit and its event",
        starts("kill before event", at=4, last=False),
        options=KEEP_ALL,
    ),
    Fault("SIGTERM in a step", starts("term"), lost=0),
    Fault(
        "SIGTERM to all processes, the loader's too",
        starts("term to all"),
        lost=0,
        pictures=True,
        options=WORKERS,
    ),
    Fault("SIGTERM in an evaluation", starts("term in evaluation", at=5), lost=0),
    Fault("SIGTERM in a decomposition", starts("term in decomposition", at=4), lost=0, kfac=True),
    Fault("SIGTERM in a checkpoint's writing", starts("term in checkpoint", at=4), lost=0),
    Fault("SIGUSR1 to torchrun", _signalled(signal.SIGUSR1, *USR1), lost=0, options=LONGER),
    Fault("two requeues in a row", _requeued_twice, lost=0),
    Fault(
        "SIGSTOP (one process: continued; of two: a hang)",
        _stopped,
        options=(f"trainer.watchdog_s={WATCHDOG_S:g}",),
    ),
    Fault(
        "C code holds the interpreter",
        starts("hold"),
        ranks=(2,),
        # The watchdog is on by default. It waits somewhat longer than other ranks do.
        options=("backend.timeout_s=5",),
    ),
    Fault("an exception in one rank", starts("raise"), crash=True),
    Fault("NaN in the loss", starts("nan loss")),
    Fault("NaN in one gradient", starts("nan gradient")),
    Fault("NaN in a factor's statistic", starts("nan statistic", at=4), kfac=True, exact=False),
    Fault("NaN in a running factor", starts("nan factor", at=4), kfac=True, exact=False),
    Fault("eigh fails", starts("no eigh", at=4), kfac=True, exact=False),
    Fault("checkpoint: a flipped bit", _damaged(_flip), lost=2 * CHECKPOINT_FREQ),
    Fault("checkpoint: a zeroed block", _damaged(_zero), lost=2 * CHECKPOINT_FREQ),
    Fault("checkpoint: a truncated file", _damaged(_truncate), lost=2 * CHECKPOINT_FREQ),
    Fault("checkpoint: no manifest", _damaged(_without_manifest), lost=2 * CHECKPOINT_FREQ),
    Fault("disk full", _full("fill disk")),
    Fault("disk full but for a little", _full("fill disk but for little")),
    Fault("a quota, met while a checkpoint is written", _full("quota")),
    Fault("no inodes left", _no_inodes),
    Fault("memory runs out", starts("no memory")),
    Fault(
        "memory runs out beside two loader workers",
        starts("no memory"),
        pictures=True,
        options=WORKERS,
    ),
    Fault("no thread can start", starts("no threads")),
    Fault("a read-only directory", _read_only, lost=0),
    Fault("W&B unreachable", _wandb_unreachable, lost=0, options=("logger=wandb",)),
    Fault("W&B's process killed", _wandb_killed, lost=0, options=("logger=wandb",)),
    *RESTART_ROWS,
    *WORKER_ROWS,
)
