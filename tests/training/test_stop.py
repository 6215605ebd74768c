"""A signal stops a run. The watchdog ends a process that hangs, but no suspended process."""

import os
import signal
import subprocess
import sys
import time

import pytest

from kfac_bench.record.events import Checkpointed
from kfac_bench.training import trainer
from kfac_bench.training.stop import SIGNALS, Stop
from tests.support import ROOT, forks
from tests.support.quick import quick_if
from tests.support.runs import before_step, end, steps_of, train

STEPS = ("kfac=none", "run_id=r", "trainer.max_steps=10")


@pytest.fixture(autouse=True)
def usual_handlers():
    """Signals as in a terminal: a shell that starts the tests with & lets them ignore SIGINT."""
    before = {s: signal.signal(s, signal.SIG_DFL) for s in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_ctrl_c_does_not_wait_for_the_step_to_end():
    stop = Stop()
    with stop.listening():
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("first", [s for s in SIGNALS if s != signal.SIGINT])
def test_other_signals_may_come_twice_and_before_ctrl_c(first):
    stop = Stop()
    with stop.listening():
        for number in (first, first, signal.SIGINT):
            signal.raise_signal(number)
            assert stop.signal == number


def test_afterwards_signals_do_what_they_did_before():
    before = {s: signal.getsignal(s) for s in SIGNALS}
    with Stop().listening():
        assert all(signal.getsignal(number) != handler for number, handler in before.items())
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        stop = Stop()
        with stop.listening():
            signal.raise_signal(signal.SIGHUP)
        assert stop.signal == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def _stopped(folder, number):
    signal.signal(number, signal.SIG_DFL)  # nohup lets its children ignore SIGHUP
    with before_step(4, lambda _: os.kill(os.getpid(), number)):
        return train(folder, *STEPS)[0]


@pytest.mark.parametrize(
    "number",
    quick_if(
        (signal.SIGTERM, signal.SIGUSR1).__contains__, [s for s in SIGNALS if s != signal.SIGINT]
    ),
)
def test_a_process_that_gets_a_signal_saves_and_the_same_command_continues(tmp_path, number):
    straight = train(tmp_path / "straight", *STEPS)[1]
    assert forks.call(_stopped, tmp_path, number) == "interrupted"
    assert steps_of(tmp_path / "r", Checkpointed) == [4]
    status, path = train(tmp_path, *STEPS)
    assert (status, end(path).step) == ("finished", 10)
    assert end(path).weights_sha256 == end(straight).weights_sha256


def test_a_signal_while_the_weights_are_hashed_loses_no_event(tmp_path, monkeypatch):
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the signal would end the process"))
    weights_sha256 = trainer.weights_sha256

    def hashed(model):
        os.kill(os.getpid(), signal.SIGTERM)
        return weights_sha256(model)

    monkeypatch.setattr(trainer, "weights_sha256", hashed)
    status, path = train(tmp_path, "trainer.max_steps=1", "kfac=none")
    assert status == end(path).status == "finished"


PROGRAM = """
import ctypes, sys, time
from pathlib import Path
from kfac_bench.training.stop import Watchdog

def waits_for_a_message():
    time.sleep(60)

def holds_the_interpreter():
    ctypes.PyDLL(None).sleep(60)  # unlike CDLL, it keeps the interpreter while C code runs

dog = Watchdog(float(sys.argv[2]), Path(sys.argv[1]), 3, in_c_code=sys.argv[3] == "hold")
with dog.watching():
    print("began", flush=True)
    if sys.argv[3] == "hold":
        holds_the_interpreter()
    for _ in range(40) if sys.argv[3] == "hang" else sys.stdin:
        time.sleep(0.05)
        dog.beat()
    print("worked", flush=True)
    if sys.argv[3] == "hang":
        waits_for_a_message()
time.sleep(1.5)
"""


def start(folder, seconds, what):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, folder, str(seconds), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_a_process_that_hangs_reports_where_and_ends(tmp_path):
    process = start(tmp_path, 1, "hang")
    out, said = process.communicate(timeout=60)
    stacks = tmp_path / "stacks-rank3.txt"
    assert (process.returncode, out) == (1, "began\nworked\n")
    assert said == (
        "kfac-train: rank 3: no progress for 1 s (trainer.watchdog_s); the stacks of its threads: "
        f"{stacks}\n"
    )
    assert "in waits_for_a_message" in stacks.read_text()


def test_c_code_that_holds_the_interpreter_is_ended(tmp_path):
    process = start(tmp_path, 1, "hold")
    out, said = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "began\n")
    assert said.startswith("Timeout (0:00:01.2")
    assert "in holds_the_interpreter" in said


@pytest.mark.slow
def test_a_process_that_was_suspended_goes_on(tmp_path):
    process = start(tmp_path, 3, "progress at each line")
    # Now the process is being watched. A process that is suspended earlier would show nothing.
    assert process.stdout.readline() == "began\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(process.pid, signal.SIGCONT)
    # A watchdog that read the clock would end the process now: there is no progress yet.
    time.sleep(0.5)
    assert process.communicate("progress\n", timeout=60) == ("worked\n", "")
    assert process.returncode == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_process_that_hangs_ends_even_if_no_stacks_can_be_written(tmp_path):
    process = start(tmp_path / "missing", 1, "hang")
    assert process.communicate(timeout=60)[1].endswith("(trainer.watchdog_s)\n")
    assert process.returncode == 1
