"""Faults of loader workers and beside them, signals that ask a run to save, and lost W&B points."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable

from kfac_bench.data.base.order import Shard, train_indices
from tests.reliability.faults import expect
from tests.reliability.faults.case import Case
from tests.reliability.faults.fault import (
    AT,
    FEW,
    KEEP_ALL,
    LATE,
    WORKERS,
    Fault,
    NotHereError,
    mount,
    starts,
)
from tests.reliability.faults.pictures import BATCH, TRAIN, folder
from tests.reliability.faults.shortages import FILLER, INODES


def _fails(kind: str, line: str, *, at: int = AT) -> Callable[[Case], None]:
    """Return an action that injects a fault into the last rank, which must end with a line."""

    def act(case: Case) -> None:
        ended = case.start(kind, at, case.ranks - 1)
        expect.codes(ended, {1})
        expect.line(ended, f"^kfac-train: .*{line}")
        expect.finished_record(case, "failed")

    return act


def _stops(kind: str, number: int) -> Callable[[Case], None]:
    """Return an action that sends a signal, at which the run must save and end."""

    def act(case: Case) -> None:
        ended = case.start(kind, AT, case.ranks - 1)
        # A rank that got no signal itself adds 0.
        expect.codes(ended, {128 + number, 128})
        if ended.codes[-1] != 128 + number:
            raise expect.UnexpectedError(f"exit codes {ended.codes}: no {128 + number}")
        expect.finished_record(case, "interrupted")

    return act


def _no_inodes(case: Case) -> None:
    mount(case, [f"nr_inodes={INODES}"])
    ended = case.start("no inodes", 6)
    expect.codes(ended, {1})
    expect.line(ended, r"^failed at step .*no inodes are left")
    shutil.rmtree(case.path.parent / FILLER)


def _no_shared_memory(case: Case) -> None:
    if os.geteuid():
        raise NotHereError(
            "a full /dev/shm needs root: unshare -rm python -m tests.reliability.faults"
        )
    _fails("no shared memory", f"(/dev/shm has no space|{WORKER_DIED})")(case)


def _spoil(case: Case) -> Callable[[], None]:
    """Cut an image of the batch of update `AT`. Return a function that repairs the image."""
    epoch, start = divmod(AT - 1, TRAIN // BATCH)
    index = next(train_indices(TRAIN, BATCH, 0, epoch, start, Shard()))[0]
    path = sorted((folder(case) / "train").glob("*/*"))[int(index)]
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])

    def repair() -> None:
        path.write_bytes(content)

    return repair


def _corrupt(case: Case) -> None:
    repair = _spoil(case)
    ended = case.start()
    expect.codes(ended, {1, 2})
    expect.line(ended, r"^kfac-train: .*\.png cannot be read")
    expect.finished_record(case, "failed")
    repair()
    case.more += ("data.changed=accept",)


def _corrupt_skipped(case: Case) -> None:
    _spoil(case)
    ended = case.start()
    expect.codes(ended, {0})
    expect.line(ended, r"^left out: .*\.png")


def _lost_points(case: Case) -> None:
    """Kill a run and its W&B process, which has not written all points."""
    case.environment = {"WANDB_MODE": "offline", "WANDB_CONFIG_DIR": str(case.folder)}
    case.start("kill with wandb", LATE)
    ended = case.start()
    expect.codes(ended, {0})


WORKER_DIED = "a process that reads data died"
FILES = "too many files are open"
SIGNALS = {
    "hup": (signal.SIGHUP, "SIGHUP"),
    "quit": (signal.SIGQUIT, "SIGQUIT"),
    "usr2": (signal.SIGUSR2, "SIGUSR2"),
}

ROWS = (
    Fault(
        "SIGKILL of a loader worker",
        _fails("kill worker", WORKER_DIED),
        pictures=True,
        options=WORKERS,
        methods=FEW,
    ),
    Fault(
        "SIGKILL of a loader worker in an evaluation",
        _fails("kill worker in evaluation", WORKER_DIED, at=6),
        pictures=True,
        options=WORKERS,
        methods=FEW,
    ),
    Fault(
        "SIGKILL of rank 0 beside loader workers",
        starts("kill", last=False),
        pictures=True,
        options=WORKERS,
        methods=FEW,
    ),
    Fault(
        "SIGKILL between commit and event, beside loader workers",
        starts("kill before event", at=4, last=False),
        pictures=True,
        options=(*WORKERS, *KEEP_ALL),
        methods=FEW,
    ),
    Fault("a corrupt sample", _corrupt, pictures=True),
    Fault(
        "a corrupt sample, data.on_error=skip",
        _corrupt_skipped,
        exact=False,
        pictures=True,
        options=("data.on_error=skip",),
    ),
    Fault(
        "a corrupt sample, read by loader workers",
        _corrupt,
        pictures=True,
        options=WORKERS,
        methods=FEW,
    ),
    Fault(
        "a corrupt sample in a loader worker, data.on_error=skip",
        _corrupt_skipped,
        exact=False,
        pictures=True,
        options=(*WORKERS, "data.on_error=skip"),
        methods=FEW,
    ),
    *(
        Fault(f"{name} in a step", _stops(kind, number), lost=0, methods=FEW)
        for kind, (number, name) in SIGNALS.items()
    ),
    *(
        Fault(
            f"{name} to all processes, the loader's too",
            _stops(f"{kind} to all", number),
            lost=0,
            pictures=True,
            options=WORKERS,
            methods=FEW,
        )
        for kind, (number, name) in SIGNALS.items()
    ),
    Fault(
        "no thread can start beside loader workers",
        _fails("no threads", "allows no more threads or processes"),
        pictures=True,
        options=WORKERS,
        methods=FEW,
    ),
    Fault(
        "no inodes left beside loader workers",
        _no_inodes,
        pictures=True,
        options=WORKERS,
        methods=FEW,
    ),
    Fault(
        "/dev/shm is full beside loader workers",
        _no_shared_memory,
        pictures=True,
        options=WORKERS,
        methods=FEW,
    ),
    Fault(
        "too many open files beside loader workers",
        # The limit holds for the main process and for new workers; one of them meets it first.
        _fails("few files", f"({FILES}|{WORKER_DIED})"),
        pictures=True,
        options=WORKERS,
        methods=FEW,
    ),
    Fault(
        "SIGKILL loses points of W&B",
        _lost_points,
        options=("logger=wandb",),
        methods=FEW,
    ),
)
