"""The faults: what happens to a run, and how the run must end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.reliability.faults import launch
from tests.reliability.faults.case import CHECKPOINT_FREQ, Case
from tests.reliability.faults.inject import FILLER

AT = 7
"""The update at which most faults happen, a few steps after a checkpoint."""
WATCHDOG_S = 4.0
INODES = 200


class NotHereError(Exception):
    """An error that says why this machine cannot try a fault."""


class UnexpectedError(Exception):
    """An error that says what a start did that it should not have done."""


@dataclass(frozen=True)
class Fault:
    """A row of the table. `act` starts the run with the fault."""

    name: str
    act: Callable[[Case], None]
    ranks: tuple[int, ...] = (1, 2)
    exact: bool = True
    """The fault changes no arithmetic: the final weights must equal those without a fault."""
    kfac: bool = False
    """The fault needs K-FAC."""
    lost: int = CHECKPOINT_FREQ
    """Number of steps that may be repeated."""
    crash: bool = False
    """The fault is an error of the program, which must print its traceback."""
    options: tuple[str, ...] = ()
    pictures: bool = False
    """The run must read its data from files."""


def _starts(kind: str, *, at: int = AT, last: bool = True) -> Callable[[Case], None]:
    """Return an action that injects the fault into the last rank, or into rank 0."""

    def act(case: Case) -> None:
        case.start(kind, at, case.ranks - 1 if last else 0)

    return act


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


def _mount(case: Case, options: Sequence[str] = ()) -> None:
    if not case.mounted("2m", options):
        raise NotHereError(
            "mounting a small disk needs root: unshare -rm python -m tests.reliability.faults"
        )


def _full(kind: str) -> Callable[[Case], None]:
    """Return an action that fills the run's own disk, and empties it before the run continues."""

    def act(case: Case) -> None:
        _mount(case)
        case.start(kind, 6)
        (case.path.parent / FILLER).unlink()

    return act


def _no_inodes(case: Case) -> None:
    _mount(case, [f"nr_inodes={INODES}"])
    case.start("no inodes", 6)
    shutil.rmtree(case.path.parent / FILLER)


def _read_only(case: Case) -> None:
    _mount(case, ["ro"])
    case.start()
    case.remount("rw")


def _spoil(case: Case) -> tuple[Path, bytes]:
    """Damage a file of the batch of update `AT`. Return its path and its former content."""
    from kfac_bench.data.base.order import Shard, train_indices
    from tests.reliability.faults.pictures import BATCH, TRAIN, folder

    epoch, start = divmod(AT - 1, TRAIN // BATCH)
    index = next(train_indices(TRAIN, BATCH, 0, epoch, start, Shard()))[0]
    path = sorted((folder(case) / "train").glob("*/*"))[int(index)]
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path, content


def _refused(case: Case, line: str) -> None:
    """Start the run, which must refuse to continue with a line that contains `line`."""
    ended = case.start()
    if set(ended.codes) != {2} or line not in ended.errors:
        said = ended.errors.strip().rpartition("\n")[2]
        raise UnexpectedError(f"exit codes {ended.codes} instead of 2: {said}")


def _changed_data(case: Case) -> None:
    """Take an image away between two starts. It is put back before the run continues."""
    from tests.reliability.faults.pictures import TRAIN, folder

    case.start("kill", 11)
    image = sorted((folder(case) / "train").glob("*/*"))[0]
    elsewhere = case.folder / image.name
    image.rename(elsewhere)
    _refused(case, f"train has {TRAIN - 1} examples, before {TRAIN}")
    elsewhere.rename(image)


def _emptied_records(case: Case) -> None:
    case.start("kill", 11)
    for name in ("config.yaml", "run.json"):
        os.truncate(case.path / name, 0)


def _cut_events(case: Case) -> None:
    case.start("kill", 11)
    os.truncate(case.events, case.events.stat().st_size // 2)


def _lost_events(case: Case) -> None:
    case.start("kill", 11)
    case.events.unlink()


def _port_in_use(case: Case) -> None:
    """Let another program listen at the port at which the ranks meet."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        case.environment = {"MASTER_PORT": port}
        ended = case.start()
    if None in ended.codes or f"port {port} is in use" not in ended.errors:
        raise UnexpectedError(f"exit codes {ended.codes}, and no line names the port")
    case.environment = {}


def _lost_points(case: Case) -> None:
    """Kill a run whose points W&B keeps offline. After the next start a line offers an upload."""
    case.environment = {"WANDB_MODE": "offline", "WANDB_CONFIG_DIR": str(case.folder)}
    case.start("kill", 11)
    ended = case.start()
    if "kfac-bench wandb upload" not in ended.out.strip().rpartition("\n")[2]:
        raise UnexpectedError("the last line does not offer kfac-bench wandb upload")


def _corrupt(case: Case) -> None:
    path, content = _spoil(case)
    case.start()
    path.write_bytes(content)
    case.more += ("data.changed=accept",)


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
    """Return an action that sends a signal to torchrun once a checkpoint exists."""

    def act(case: Case) -> None:
        def meanwhile(agent: int) -> float:
            _wait_until(lambda: bool(case.checkpoints()))
            os.kill(agent, number)
            return 0.0

        _torchrun(case, meanwhile, *flags)
        if number == signal.SIGKILL:
            # The ranks lost their launcher. They end by themselves and release the run's lock.
            _wait_until(lambda: case.status() is not None)
            time.sleep(0.5)

    return act


def _restarted(case: Case) -> None:
    """Kill a rank and let torchrun restart all ranks."""
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
            raise TimeoutError("the expected state did not come")
        time.sleep(0.01)


WORKERS = ("data.workers=2",)
LONGER = ("trainer.max_steps=40",)
"""Some seconds, for signals that come from outside."""
USR1 = ("--signals-to-handle", "SIGUSR1,SIGTERM,SIGINT")

ROWS = (
    Fault("SIGKILL of rank 0", _starts("kill", last=False)),
    Fault("SIGKILL of another rank", _starts("kill"), ranks=(2,)),
    Fault(
        "SIGKILL of rank 0 beside loader workers",
        _starts("kill", last=False),
        pictures=True,
        options=WORKERS,
    ),
    Fault("SIGKILL of a loader worker", _starts("kill worker"), pictures=True, options=WORKERS),
    Fault("SIGKILL of a rank, torchrun restarts", _restarted),
    Fault("SIGKILL of torchrun", _signalled(signal.SIGKILL), options=LONGER),
    Fault(
        "SIGKILL while a checkpoint is committed",
        _starts("kill in commit", last=False),
        # The checkpoint that was being written is lost too.
        lost=2 * CHECKPOINT_FREQ,
    ),
    Fault(
        "SIGKILL between a checkpoint's commit and its event",
        _starts("kill before event", at=4, last=False),
    ),
    Fault(
        "SIGKILL between commit and event, beside loader workers",
        _starts("kill before event", at=4, last=False),
        pictures=True,
        options=WORKERS,
    ),
    Fault("SIGTERM in a step", _starts("term"), lost=0),
    Fault("SIGHUP in a step", _starts("hup"), lost=0),
    Fault("SIGQUIT in a step", _starts("quit"), lost=0),
    Fault("SIGUSR2 in a step", _starts("usr2"), lost=0),
    Fault(
        "SIGTERM to all processes, the loader's too",
        _starts("term to all"),
        lost=0,
        pictures=True,
        options=WORKERS,
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
    Fault(
        "C code holds the interpreter",
        _starts("hold"),
        ranks=(2,),
        # The watchdog is on by default. It waits somewhat longer than other ranks do.
        options=("backend.timeout_s=5",),
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
    Fault("the record's second half is lost", _cut_events),
    Fault("the record is deleted", _lost_events),
    Fault("config.yaml and run.json are empty", _emptied_records),
    Fault("the data changed between two starts", _changed_data, pictures=True),
    Fault(
        "the port of the ranks is in use",
        _port_in_use,
        ranks=(2,),
        # Rank 1 waits this long for an answer.
        options=("backend.timeout_s=5",),
    ),
    Fault("disk full", _full("fill disk")),
    Fault("disk full but for a little", _full("fill disk but for little")),
    Fault("a quota, met while a checkpoint is written", _full("quota")),
    Fault("no inodes left", _no_inodes),
    Fault("memory runs out", _starts("no memory")),
    Fault(
        "memory runs out beside two loader workers",
        _starts("no memory"),
        pictures=True,
        options=WORKERS,
    ),
    Fault("no thread can start", _starts("no threads")),
    Fault(
        "no thread can start beside loader workers",
        _starts("no threads"),
        pictures=True,
        options=WORKERS,
    ),
    Fault("a read-only directory", _read_only, lost=0),
    Fault("a corrupt sample", _corrupt, pictures=True),
    Fault("a corrupt sample, read by loader workers", _corrupt, pictures=True, options=WORKERS),
    Fault(
        "a corrupt sample, data.on_error=skip",
        _corrupt_skipped,
        exact=False,
        pictures=True,
        options=("data.on_error=skip",),
    ),
    Fault("W&B unreachable", _wandb_unreachable, lost=0, options=("logger=wandb",)),
    Fault("SIGKILL loses points of W&B", _lost_points, options=("logger=wandb",)),
    Fault("W&B's process killed", _wandb_killed, lost=0, options=("logger=wandb",)),
)
