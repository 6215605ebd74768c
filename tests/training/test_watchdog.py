"""The watchdog ends a process that hangs, and leaves a working or suspended process alone."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import ROOT

PROGRAM = """
import ctypes, sys, time
from pathlib import Path
from kfac_bench.training.watchdog import Watchdog

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


def test_a_process_that_hangs_ends_even_if_no_stacks_can_be_written(tmp_path):
    process = start(tmp_path / "missing", 1, "hang")
    assert process.communicate(timeout=60)[1].endswith("(trainer.watchdog_s)\n")
    assert process.returncode == 1
