"""The watchdog ends a process that hangs, and leaves a working or suspended process alone."""

import os
import signal
import subprocess
import sys
import time

from tests.support import ROOT

PROGRAM = """
import sys, time
from pathlib import Path
from kfac_bench.training.watchdog import Watchdog

def waits_for_a_message():
    time.sleep(60)

dog = Watchdog(1.0, Path(sys.argv[1]), 3)
with dog.watching():
    print("began", flush=True)
    beats = 0
    while beats < 40 or sys.argv[2] == "until told" and not Path(sys.argv[3]).exists():
        time.sleep(0.05)
        dog.beat()
        beats += 1
    print("worked", flush=True)
    if sys.argv[2] == "hang":
        waits_for_a_message()
time.sleep(1.5)
"""


def start(folder, *what):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, folder, *what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_a_process_that_hangs_reports_where_and_ends(tmp_path):
    process = start(tmp_path, "hang")
    out, said = process.communicate(timeout=60)
    stacks = tmp_path / "stacks-rank3.txt"
    assert (process.returncode, out) == (1, "began\nworked\n")
    assert said == (
        "kfac-train: rank 3: no progress for 1 s (trainer.watchdog_s); the stacks of its threads: "
        f"{stacks}\n"
    )
    assert "in waits_for_a_message" in stacks.read_text()


def test_a_process_that_was_suspended_goes_on(tmp_path):
    folder, enough = tmp_path / "run", tmp_path / "enough"
    folder.mkdir()
    process = start(folder, "until told", enough)
    # Only now it is watched: what is stopped before would show nothing.
    assert process.stdout.readline() == "began\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)
    enough.touch()
    assert process.communicate(timeout=60) == ("worked\n", "")
    assert process.returncode == 0
    assert not list(folder.iterdir())


def test_a_process_that_hangs_ends_even_if_no_stacks_can_be_written(tmp_path):
    process = start(tmp_path / "missing", "hang")
    assert process.communicate(timeout=60)[1].endswith("(trainer.watchdog_s)\n")
    assert process.returncode == 1
