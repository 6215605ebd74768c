"""The processes that a benchmark starts for runs of several ranks."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from kfac_bench.benchmark import local_runs

CHILD = """
import sys, time
with open(sys.argv[1], "w") as fifo:
    print("ready", file=fifo, flush=True)
    time.sleep(30)
"""
LAUNCHER = """
import signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: rank.kill())
rank.wait()
"""
CALLER = """
import sys
from kfac_bench.benchmark import local_runs
local_runs.run_command([sys.executable, "-c", *sys.argv[1:]])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of the death")
def test_a_command_ends_if_its_caller_is_killed(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    words = [sys.executable, "-c", CALLER, CHILD, str(tmp_path / "fifo")]
    with subprocess.Popen(words) as caller, (tmp_path / "fifo").open() as fifo:
        assert fifo.readline() == "ready\n"
        caller.kill()
        # The file ends when the child does.
        assert fifo.read() == ""


def test_an_interrupted_command_ends_the_ranks_that_it_started(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    words = [sys.executable, "-c", LAUNCHER, CHILD, str(tmp_path / "fifo")]
    # The file ends when the rank does.
    reader = threading.Thread(target=(tmp_path / "fifo").read_text, daemon=True)
    reader.start()
    # The timer's own thread must not take the signal: this thread would go on waiting.
    here = threading.get_ident()
    threading.Timer(1, signal.pthread_kill, (here, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        local_runs.run_command(words)
    reader.join(10)
    assert not reader.is_alive()


def test_output_that_is_not_utf_8_is_no_error():
    program = r"import os, sys; os.write(2, b'caf\xe9'); sys.exit(3)"
    code, line = local_runs.run_command([sys.executable, "-c", program])
    assert code == 3
    assert line.startswith("caf")


def test_only_a_busy_machine_gets_a_warning(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    said = []
    for load in (0.5, 2.9):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 9.0, 9.0))
        local_runs.warn_if_busy(said.append)
    assert said == [
        "the machine was busy in the last minute, so times may be too long: load 2.9, 2 cores"
    ]
