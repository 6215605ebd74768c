"""The faults: what is done to a run, and what is expected of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.reliability.faults import launch
from tests.reliability.faults.case import CHECKPOINT_FREQ, Case
from tests.reliability.faults.inject import FILLER

AT = 7
"""The update before or in which things happen: two steps after a checkpoint, and some."""
WATCHDOG_S = 4.0


class NotHereError(Exception):
    """It cannot be done on this machine."""


@dataclass(frozen=True)
class Fault:
    """A row. ``act`` starts the run and does it; the same command then goes on, if need be."""

    name: str
    act: Callable[[Case], None]
    ranks: tuple[int, ...] = (1, 2)
    exact: bool = True
    """It touches no arithmetic: the final weights must be those of the undisturbed run."""
    kfac: bool = False
    """There is nothing to do it to with SGD."""
    lost: int = CHECKPOINT_FREQ
    """Steps that may be done again."""
    crash: bool = False
    """An error of the program itself: its traceback is wanted."""
    options: tuple[str, ...] = ()
    pictures: bool = False
    """The data are files."""


def _starts(kind: str, *, at: int = AT, last: bool = True) -> Callable[[Case], None]:
    """Meets the last rank, or rank 0."""

    def act(case: Case) -> None:
        case.start(kind, at, case.ranks - 1 if last else 0)

    return act


def _requeued_twice(case: Case) -> None:
    case.start("term", 3)
    case.start("term", 9, case.ranks - 1)


def _stopped(case: Case) -> None:
    """A process alone is continued after a while; of two, one never is."""

    def meanwhile(pids: list[int]) -> None:
        deadline = time.monotonic() + launch.ENDS_S
        while Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            if time.monotonic() > deadline:
                raise TimeoutError("it did not stop")
            time.sleep(0.01)
        time.sleep(1.5 * WATCHDOG_S)
        os.kill(pids[0], signal.SIGCONT)

    if case.ranks == 1:
        case.start("stop", AT, meanwhile=meanwhile)
    else:
        case.start("stop", AT, case.ranks - 1)


def _damaged(damage: Callable[[Path], None]) -> Callable[[Case], None]:
    """The newest checkpoint of a run that was killed."""

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
    """A disk of its own is filled at a step, and emptied before the run goes on."""

    def act(case: Case) -> None:
        if not case.mounted("2m"):
            raise NotHereError(
                "mounting a small disk needs root: unshare -rm python -m tests.reliability.faults"
            )
        case.start(kind, 6)
        (case.path.parent / FILLER).unlink()

    return act


def _read_only(case: Case) -> None:
    if not case.mounted("2m", ["ro"]):
        raise NotHereError(
            "mounting a small disk needs root: unshare -rm python -m tests.reliability.faults"
        )
    case.start()
    case.remount("rw")


def _spoil(case: Case) -> tuple[Path, bytes]:
    """A file of the batch of update ``AT``."""
    from kfac_bench.data.base.order import Shard, train_indices
    from tests.reliability.faults.pictures import BATCH, TRAIN, folder

    epoch, start = divmod(AT - 1, TRAIN // BATCH)
    index = next(train_indices(TRAIN, BATCH, 0, epoch, start, Shard()))[0]
    path = sorted((folder(case) / "train").glob("*/*"))[int(index)]
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path, content


def _corrupt(case: Case) -> None:
    path, content = _spoil(case)
    case.start()
    path.write_bytes(content)


def _corrupt_skipped(case: Case) -> None:
    _spoil(case)
    case.start()


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
    """To torchrun itself, once there is a checkpoint."""

    def act(case: Case) -> None:
        def meanwhile(agent: int) -> float:
            _wait_until(lambda: bool(case.checkpoints()))
            os.kill(agent, number)
            return 0.0

        _torchrun(case, meanwhile, *flags)
        if number == signal.SIGKILL:
            _wait_until(lambda: case.status() is not None)  # ranks that lost their launcher
            time.sleep(0.5)  # and they let the run's lock go

    return act


def _restarted(case: Case) -> None:
    """A rank is killed, torchrun starts all anew."""
    injected = case.injection("kill", AT, case.ranks - 1, once=True)

    def meanwhile(agent: int) -> float:
        _wait_until(case.marks[0].exists)
        return launch.seconds_to_a_new_step(case.events, launch.size_of(case.events))

    case.launches.append(
        launch.torchrun(
            case.folder, case.ranks, case.options, meanwhile, injected, ["--max-restarts", "1"]
        )
    )


def _wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + launch.ENDS_S
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError("nothing came of it")
        time.sleep(0.01)


LONGER = ("trainer.max_steps=40",)
"""For signals that come from outside: some seconds."""
USR1 = ("--signals-to-handle", "SIGUSR1,SIGTERM,SIGINT")

ROWS = (
    Fault("SIGKILL of rank 0", _starts("kill", last=False)),
    Fault("SIGKILL of another rank", _starts("kill"), ranks=(2,)),
    Fault("SIGKILL of a rank, torchrun restarts", _restarted),
    Fault("SIGKILL of torchrun", _signalled(signal.SIGKILL), options=LONGER),
    Fault(
        "SIGKILL while a checkpoint is committed",
        _starts("kill in commit", last=False),
        lost=2 * CHECKPOINT_FREQ,  # this one's steps, too
    ),
    Fault("SIGTERM in a step", _starts("term"), lost=0),
    Fault(
        "SIGTERM to all processes, the loader's too",
        _starts("term to all"),
        lost=0,
        pictures=True,
        options=("data.workers=1",),
    ),
    Fault("SIGTERM in an evaluation", _starts("term in evaluation", at=5), lost=0),
    Fault("SIGTERM in a decomposition", _starts("term in decomposition", at=4), lost=0, kfac=True),
    Fault("SIGTERM in a checkpoint's writing", _starts("term in checkpoint", at=4), lost=0),
    Fault("SIGUSR1 to torchrun", _signalled(signal.SIGUSR1, *USR1), lost=0, options=LONGER),
    Fault("two requeues in a row", _requeued_twice, lost=0),
    Fault(
        "SIGSTOP (one process: continued; of two: a hang)",
        _stopped,
        options=(f"trainer.watchdog_s={WATCHDOG_S:g}",),
    ),
    Fault("an exception in one rank", _starts("raise"), crash=True),
    Fault("NaN in the loss", _starts("nan loss")),
    Fault("NaN in one gradient", _starts("nan gradient")),
    Fault("NaN in a factor's statistic", _starts("nan statistic", at=4), kfac=True, exact=False),
    Fault("NaN in a running factor", _starts("nan factor", at=4), kfac=True, exact=False),
    Fault("eigh fails", _starts("no eigh", at=4), kfac=True, exact=False),
    Fault("checkpoint: a flipped bit", _damaged(_flip), lost=2 * CHECKPOINT_FREQ),
    Fault("checkpoint: a zeroed block", _damaged(_zero), lost=2 * CHECKPOINT_FREQ),
    Fault("checkpoint: a truncated file", _damaged(_truncate), lost=2 * CHECKPOINT_FREQ),
    Fault("checkpoint: no manifest", _damaged(_without_manifest), lost=2 * CHECKPOINT_FREQ),
    Fault("disk full", _full("fill disk")),
    Fault("disk full but for a little", _full("fill disk but for little")),
    Fault("a quota, met while a checkpoint is written", _full("quota")),
    Fault("a read-only directory", _read_only, lost=0),
    Fault("a corrupt sample", _corrupt, pictures=True),
    Fault(
        "a corrupt sample, data.on_error=skip",
        _corrupt_skipped,
        exact=False,
        pictures=True,
        options=("data.on_error=skip",),
    ),
    Fault("W&B unreachable", _wandb_unreachable, lost=0, options=("logger=wandb",)),
    Fault("W&B's process killed", _wandb_killed, lost=0, options=("logger=wandb",)),
)
