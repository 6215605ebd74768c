"""Processes that read ahead, and the signals that reach them: those of a whole job step."""

import multiprocessing
import os
import signal
import subprocess
import time

import pytest
import torch
from torch.utils.data import Dataset

from kfac_bench.data.base import loader
from kfac_bench.data.base.unreadable import Faults
from tests.reliability.faults import matrix

BATCHES = 12


class Numbers(Dataset):
    """Each is itself."""

    def __getitem__(self, index):
        return (torch.tensor(index),)


def batches(workers=1):
    indices = iter(torch.arange(2 * BATCHES).view(BATCHES, 2))
    return loader.load_batches(Numbers(), indices, workers, (), Faults(skip=False))


@pytest.fixture
def reading():
    """Batches, of which one is read, and the process that reads the others."""
    others = {process.pid for process in multiprocessing.active_children()}  # pools of ranks
    made = batches()
    next(made)
    (worker,) = (p for p in multiprocessing.active_children() if p.pid not in others)
    yield made, worker
    made.close()
    assert not worker.is_alive()


@pytest.mark.parametrize("name", ["TERM", "USR1", "INT"])
def test_a_worker_lives_on_when_all_processes_get_a_signal(reading, name):
    made, worker = reading
    for _ in range(2):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)  # by none of its parents
        time.sleep(0.1)
    assert worker.is_alive()
    assert [x.tolist() for (x,) in made] == [[2 * i, 2 * i + 1] for i in range(1, BATCHES)]


def test_its_own_process_can_end_a_worker(reading):
    _, worker = reading
    os.kill(worker.pid, signal.SIGTERM)  # as the loader does it with one that hangs
    worker.join(20)
    assert worker.exitcode == 0


@pytest.mark.timeout(300)
def test_a_run_that_is_told_with_its_workers_saves_and_goes_on():
    (fault,) = matrix.find(["loader"])
    outcomes = matrix.run([fault], [1, 2], ["SGD"], lambda line: None)
    assert [(o.wrong, o.again, o.lost_steps, o.identical) for o in outcomes] == [
        ("", True, 0, True)
    ] * 2
