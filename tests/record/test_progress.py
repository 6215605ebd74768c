"""Lines about what takes long, and the answer to Ctrl-C."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from kfac_bench.record import progress as module
from kfac_bench.record.progress import Progress, Task
from kfac_bench.record.sinks.console import ConsoleSink
from kfac_bench.stop_signals import interrupt_afterwards
from tests.support.runs import train

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_task_without_a_count_says_how_long_it_has_taken(clock):
    task = Task("loading PyTorch", None, "")
    clock[0] += 7
    assert task.line() == "loading PyTorch: 7 s so far"


def test_the_time_left_does_not_count_the_first_part(clock):
    """The first step of a run decomposes all factors; the others are much shorter."""
    state = [0, 100]
    task = Task("training", lambda: tuple(state), "")
    clock[0] += 60
    assert task.line() == "training: 60 s so far"
    state[0] = 1
    assert task.line() == "training: 1 of 100 done"
    clock[0] += 4
    state[0] = 3
    assert task.line() == "training: 3 of 100 done, about 3 min 14 s left"


def test_ctrl_c_waits_for_the_end_of_an_import_that_would_swallow_it():
    seen = []

    def load():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)
        except KeyboardInterrupt:
            seen.append("swallowed")
        seen.append("end")

    with pytest.raises(KeyboardInterrupt), interrupt_afterwards():
        load()
    assert seen == ["end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Screen:
    """Lines as they are printed; one can wait for the next."""

    def __init__(self, monkeypatch):
        self.lines, self._more = [], threading.Semaphore(0)
        monkeypatch.setattr(module, "_print", self._add)

    def _add(self, line):
        self.lines.append(line)
        self._more.release()

    def wait(self):
        assert self._more.acquire(timeout=60)
        return self.lines[-1]


@pytest.fixture
def screen(monkeypatch):
    for name, seconds in {"TICK_S": 0.01, "QUIET_S": 0.05, "INTERVAL_S": 0.05}.items():
        monkeypatch.setattr(module, name, seconds)
    return Screen(monkeypatch)


def test_a_slow_task_is_shown_and_the_innermost_one(screen):
    progress, done = Progress(), [2]
    with progress.showing(), progress.task("training"):
        assert screen.wait().startswith("training: ")
        with progress.task("evaluation", lambda: (done[0], 10)):
            while screen.wait().startswith("training: "):
                pass
            assert screen.lines[-1] == "evaluation: 2 of 10 done"
        while not screen.wait().startswith("training: "):
            pass


def test_nothing_is_shown_of_short_tasks_or_beside_other_lines(screen, monkeypatch):
    progress = Progress()
    monkeypatch.setattr(module, "QUIET_S", 1e9)
    with progress.showing(), progress.task("short"):
        time.sleep(0.1)
    monkeypatch.setattr(module, "QUIET_S", 0.0)
    monkeypatch.setattr(module, "INTERVAL_S", 1e9)
    progress.note_line()
    with progress.showing(), progress.task("training"):
        time.sleep(0.1)
    assert screen.lines == []


def test_each_line_of_the_console_is_noted(monkeypatch, capsys):
    noted = []
    monkeypatch.setattr(module.Progress, "note_line", lambda self: noted.append(1))
    ConsoleSink(metric="m", higher_is_better=True).say("a\nb")
    assert len(noted) == 2


def test_signals_get_an_answer_and_the_old_descriptor_comes_back(screen):
    progress = Progress()
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with progress.showing(), progress.task("training", ends="the run saves and ends then"):
            signal.raise_signal(signal.SIGINT)
            while not screen.wait().startswith("Ctrl-C"):
                pass
            assert screen.lines[-1] == (
                "Ctrl-C: waits for the end of this: training; the run saves and ends then"
            )
            signal.raise_signal(signal.SIGINT)
            while not screen.wait().startswith("Ctrl-C again"):
                pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT] * 2
    assert signal.set_wakeup_fd(-1) == -1


def test_a_run_names_what_may_take_long(tmp_path, monkeypatch):
    names, counts, real = [], {}, Progress.task

    def task(self, name, count=None, **options):
        names.append(name)
        counts[name] = count
        return real(self, name, count, **options)

    monkeypatch.setattr(Progress, "task", task)
    train(tmp_path, "trainer.max_steps=2", "trainer.eval_batch_size=100", "kfac.spread=false")
    assert names == [
        "reading the data and building the model",
        "opening the log",
        "comparing the data with those of the checkpoint",
        "training",
        "evaluation",
        "K-FAC decomposes its factors",
        "evaluation",
        "saving",
        "saving",
    ]
    assert counts["training"]() == (2, 2)
    assert counts["evaluation"]() == (450, 450)
    assert counts["K-FAC decomposes its factors"]() == (0, 8)  # the second step decomposes none


BUSY = """
    import torch
    from kfac_bench.record.progress import progress
    from kfac_bench.training.stop import Stop

    torch.set_num_threads(1)
    matrix = torch.randn(3000, 3000, dtype=torch.float64)
    with progress.showing(), Stop().listening():
        with progress.task("K-FAC decomposes its factors", ends="the run saves and ends then"):
            print("ready", flush=True)
            torch.linalg.eigh(matrix + matrix.T)
            print("end", flush=True)
"""


@pytest.mark.alone
@pytest.mark.slow
def test_ctrl_c_is_answered_while_lapack_runs():
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BUSY)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)  # now LAPACK runs, for seconds
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        line = process.stdout.readline()
        if line.endswith(" s so far\n"):  # was printed just before
            line = process.stdout.readline()
        assert time.monotonic() - start < 2
        assert line.startswith("Ctrl-C: waits for the end of this: K-FAC decomposes its factors")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
