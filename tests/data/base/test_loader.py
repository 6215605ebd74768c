"""Loader workers that read ahead, and the signals that they ignore or obey."""

import errno
import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.context import ForkContext

import pytest
import torch
from torch.utils.data import Dataset

from kfac_bench.data.base import loader
from kfac_bench.data.base.files import Faults
from kfac_bench.errors import WorkerLostError
from tests.reliability.faults import matrix

BATCHES = 12


class Numbers(Dataset):
    """A dataset whose samples are their own indices."""

    def __getitem__(self, index):
        return (torch.tensor(index),)


def batches(workers=1, samples=None):
    indices = iter(torch.arange(2 * BATCHES).view(BATCHES, 2))
    return loader.load_batches(samples or Numbers(), indices, workers, (), Faults(skip=False))


@pytest.fixture
def reading():
    """Yield batches, after the first one was read, and the worker that reads the others."""
    # Rank pools of other tests are children of this process, too.
    others = {process.pid for process in multiprocessing.active_children()}
    made = batches()
    next(made)
    (worker,) = (p for p in multiprocessing.active_children() if p.pid not in others)
    yield made, worker
    made.close()
    assert not worker.is_alive()


@pytest.mark.parametrize("name", ["TERM", "USR1", "INT"])
def test_a_worker_survives_a_signal_from_another_process(reading, name):
    made, worker = reading
    for _ in range(2):
        # The program `kill` is not the worker's parent.
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
        time.sleep(0.1)
    assert worker.is_alive()
    assert [x.tolist() for (x,) in made] == [[2 * i, 2 * i + 1] for i in range(1, BATCHES)]


def test_sigterm_from_the_parent_ends_a_worker(reading):
    _, worker = reading
    # The DataLoader does this to a worker that hangs.
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(60)
    assert worker.exitcode == 0


class OpensFiles(Numbers):
    """A worker that may open one more file: the memory of a batch, but no socket to share it."""

    def __getitem__(self, index):
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        opened = []
        with suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        if opened:
            os.close(opened[-1])
        return super().__getitem__(index)


@pytest.mark.timeout(60)
def test_a_worker_that_cannot_hand_over_a_batch_ends(capfd):
    with pytest.raises(WorkerLostError, match="a process that reads data died"):
        next(batches(samples=OpensFiles()))
    said = capfd.readouterr().err
    assert "a process that reads data: too many files are open" in said
    assert "Traceback" not in said


def test_a_loader_that_cannot_start_prints_nothing_later(monkeypatch):
    def new_queue(context):
        raise OSError(errno.ENOSPC, "no room in /dev/shm")

    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    monkeypatch.setattr(ForkContext, "Queue", new_queue)
    with pytest.raises(OSError, match="no room"):
        next(batches())
    gc.collect()
    assert lost == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_whose_workers_get_the_signal_too_saves_and_resumes():
    (fault,) = matrix.find(["SIGTERM to all processes, the loader's too"])
    outcomes = matrix.run([fault], [1, 2], ["SGD"], lambda line: None)
    assert [(o.wrong, o.again, o.lost_steps, o.identical) for o in outcomes] == [
        ("", True, 0, True)
    ] * 2
