"""Faults between two starts: the data, the record or the disk is not what the first start left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from kfac_bench.record.events import DataChanged, RecordGap
from tests.reliability.faults import expect, launch, pictures
from tests.reliability.faults.case import CHECKPOINT_FREQ, Case
from tests.reliability.faults.fault import AT, FEW, LATE, WORKERS, Fault, mount, wait_until
from tests.reliability.faults.kills import children, may_save
from tests.reliability.faults.shortages import FILLER, INODES, empty_files, fill

ONE_LESS = f"the data changed since .*: train has {pictures.TRAIN - 1} examples, before"
MOVED = "train has .* as before, but names, sizes or labels changed"
GAP = r"events before step \d+ are missing .* an event marks the gap"
NO_SPACE = r"No space left on device|0\.\d MB are free"


def _first_image(case: Case) -> Path:
    return sorted((pictures.folder(case) / "train").glob("*/*"))[0]


def _refused(elsewhere: Callable[[Path], Path], line: str) -> Callable[[Case], None]:
    """Return an action that moves an image, is refused with a line, and moves the image back."""

    def act(case: Case) -> None:
        case.start("kill", LATE)
        image, before = _first_image(case), case.events.read_bytes()
        moved = image.rename(elsewhere(image))
        ended = case.start()
        expect.codes(ended, {2})
        expect.line(ended, f"^kfac-train: .*{line}")
        if case.events.read_bytes() != before:
            raise expect.UnexpectedError("the refused start wrote into the record")
        moved.rename(image)

    return act


def _out_of_the_data(image: Path) -> Path:
    return image.parents[2].with_name(image.name)


def _into_the_other_class(image: Path) -> Path:
    return image.parents[1] / "class1" / image.name


def _accepted(case: Case) -> None:
    case.start("kill", LATE)
    _first_image(case).unlink()
    case.more += ("data.changed=accept",)
    ended = case.start()
    expect.line(ended, ONE_LESS)
    expect.recorded(case, DataChanged)


def _emptied(case: Case) -> None:
    names = ("config.yaml", "run.json")
    case.start("kill", LATE)
    config = (case.path / "config.yaml").read_bytes()
    for name in names:
        os.truncate(case.path / name, 0)
    case.start()
    # run.json names this start, so its text may be another one.
    if (case.path / "config.yaml").read_bytes() != config:
        raise expect.UnexpectedError("config.yaml has another content than before")
    if not (case.path / "run.json").stat().st_size:
        raise expect.UnexpectedError("run.json is still empty")


def _filled_with_zeros(case: Case) -> None:
    """Replace the contents with zero bytes, as a power cut does on some file systems."""
    case.start("kill", LATE)
    for name in ("config.yaml", "run.json"):
        path = case.path / name
        path.write_bytes(b"\0" * path.stat().st_size)


def _full_at_the_first_start(case: Case) -> None:
    mount(case)
    fill(case.path.parent / FILLER, 0)
    ended = case.start()
    expect.codes(ended, {2})
    expect.line(ended, r"^kfac-train: .*cannot write here \(No space left on device\)")
    (case.path.parent / FILLER).unlink()


def _full_at_the_restart(case: Case) -> None:
    mount(case)
    case.start("kill", LATE)
    fill(case.path.parent / FILLER, 0)
    ended = case.start()
    expect.codes(ended, {1})
    expect.line(ended, f"^failed at step .*({NO_SPACE})")
    (case.path.parent / FILLER).unlink()


def _no_inodes_at_the_restart(case: Case) -> None:
    mount(case, [f"nr_inodes={INODES}"])
    case.start("kill", LATE)
    empty_files(case.path.parent / FILLER)
    ended = case.start()
    expect.codes(ended, {1})
    expect.line(ended, r"^failed at step .*no inodes are left")
    shutil.rmtree(case.path.parent / FILLER)


def _suspended_with_workers(pid: int) -> bool:
    """Suspend a rank if it has loader workers that do not end at this moment."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.1)
    if any(_is_alive(worker) for worker in children(pid)):
        return True
    os.kill(pid, signal.SIGCONT)
    return False


def _is_alive(pid: int) -> bool:
    """Return whether the process is more than a zombie, which its parent has not collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _killed_together(case: Case) -> None:
    """Kill all ranks while their loader workers live on. Give the same command at once."""
    with launch.own_port() as port:
        # As with a launcher that always uses the same port.
        case.environment = {"MASTER_PORT": port}

        def meanwhile(pids: list[int]) -> None:
            wait_until(lambda: bool(case.checkpoints()) and _suspended_with_workers(pids[0]))
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        expect.codes(case.start(meanwhile=meanwhile), {-signal.SIGKILL})
        again = case.start()
    case.environment = {}
    expect.codes(again, {0})
    # The workers that live on hold neither the lock nor the port.
    expect.line(again, "another process still runs it", times=0)


def _still_saving(case: Case) -> None:
    """Give the same command while the ranks of the first one still save."""
    again: list[launch.Ended] = []
    folder, waits = case.folder / "again", "another process still runs it; waits up to 10 s"

    def wait_for_the_line(_: list[int]) -> None:
        wait_until(lambda: waits in (folder / "out0").read_text())
        may_save(case.marks[0]).touch()

    def meanwhile(_: list[int]) -> None:
        wait_until(case.marks[0].exists)
        folder.mkdir()
        (folder / "out0").touch()
        again.append(
            launch.by_hand(
                folder,
                case.ranks,
                case.options,
                environment=case.environment,
                events=case.events,
                meanwhile=wait_for_the_line,
            )
        )

    first = case.start("slow term", AT, meanwhile=meanwhile)
    case.launches += again
    expect.codes(first, {128 + signal.SIGTERM, 128})
    expect.codes(again[0], {0})
    expect.line(again[0], waits)


def _lost_events(damage: Callable[[Path], None]) -> Callable[[Case], None]:
    """Return an action that damages the record behind the checkpoint, and continues the run."""

    def act(case: Case) -> None:
        case.start("kill", LATE)
        damage(case.events)
        ended = case.start()
        expect.line(ended, GAP)
        expect.recorded(case, RecordGap)

    return act


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _change(path: Path) -> None:
    path.write_text(path.read_text().replace('"train_s": 0.', '"train_s": 1.', 1))


def _removed_meanwhile(case: Case) -> None:
    ended = case.start("remove record", 10)
    expect.codes(ended, {1})
    expect.line(ended, "another program has changed or removed it during the run")
    again = case.start()
    expect.line(again, GAP)
    expect.recorded(case, RecordGap)


def _port_in_use(case: Case) -> None:
    """Let another program listen at the port at which the ranks meet."""
    case.start("kill", LATE)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        case.environment = {"MASTER_PORT": port}
        ended = case.start()
    case.environment = {}
    expect.codes(ended, {1, 2})
    expect.line(ended, f"^kfac-train: rank 0: port {port} is in use .* another MASTER_PORT")
    expect.line(ended, f"^kfac-train: rank 1: .*127.0.0.1:{port}")


ROWS = (
    Fault(
        "the data changed between two starts",
        _refused(_out_of_the_data, ONE_LESS),
        pictures=True,
        methods=FEW,
    ),
    Fault(
        "a label changed between two starts",
        _refused(_into_the_other_class, MOVED),
        pictures=True,
        options=WORKERS,
        methods=FEW,
    ),
    Fault(
        "the data changed between two starts, data.changed=accept",
        _accepted,
        exact=False,
        pictures=True,
        options=WORKERS,
        methods=FEW,
    ),
    Fault("config.yaml and run.json are empty", _emptied, methods=FEW),
    Fault("config.yaml and run.json have only zero bytes", _filled_with_zeros, methods=FEW),
    Fault("the disk is full at the first start", _full_at_the_first_start, lost=0, methods=FEW),
    Fault(
        "the disk is full at the restart",
        _full_at_the_restart,
        lost=2 * CHECKPOINT_FREQ,
        methods=FEW,
    ),
    Fault(
        "no inodes are left at the restart",
        _no_inodes_at_the_restart,
        # The start without inodes repeats steps, too.
        lost=2 * CHECKPOINT_FREQ,
        methods=FEW,
    ),
    Fault(
        "SIGKILL of all ranks beside loader workers, restart at the same port",
        _killed_together,
        pictures=True,
        options=WORKERS,
        methods=FEW,
    ),
    Fault(
        "the same command while the run still saves",
        _still_saving,
        lost=0,
        pictures=True,
        options=WORKERS,
        methods=FEW,
    ),
    Fault("the record's second half is lost", _lost_events(_cut), methods=FEW),
    Fault("the record is deleted", _lost_events(Path.unlink), methods=FEW),
    Fault("the record is changed", _lost_events(_change), methods=FEW),
    Fault("the record is deleted during the run", _removed_meanwhile, methods=FEW),
    Fault(
        "the port of the ranks is in use",
        _port_in_use,
        ranks=(2,),
        options=("backend.timeout_s=5",),
        methods=FEW,
    ),
)
