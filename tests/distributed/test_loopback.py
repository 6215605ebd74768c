"""Ranks of one machine listen at loopback addresses only, which no other machine reaches."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kfac_bench.benchmark import local_runs
from kfac_bench.distributed.backends.ddp import is_loopback, process_group
from kfac_bench.errors import OneRankError
from tests.support import ROOT, forks
from tests.support.quick import slow
from tests.support.runs import CPU

LISTENING = "0A"
KEEPS_THE_PORT = """
import os, signal, socket, sys
from datetime import timedelta
from kfac_bench.distributed.backends.ddp import loopback_store
port = int(sys.argv[1])
store = loopback_store("127.0.0.1", port, 0, 1, timedelta(seconds=20))
reader, writer = os.pipe()
worker = os.fork()
if worker == 0:
    os.write(writer, b"x")
    signal.pause()
os.read(reader, 1)
store.set("key", "value")
print(store.get("key").decode())
del store
try:
    loopback_store("127.0.0.1", port, 0, 1, timedelta(seconds=20))
    print("free")
finally:
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
"""


def listening(pids):
    """Return the addresses at which TCP sockets of these processes listen, as Linux shows them."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                inodes.add(os.readlink(link))
    found = set()
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in inodes:
                digits = bytes.fromhex(fields[1].partition(":")[0])
                # The kernel prints words of four bytes in the machine's own order.
                words = [digits[i : i + 4][::-1] for i in range(0, len(digits), 4)]
                found.add(socket.inet_ntop(family, b"".join(words)))
    return found


def tree(pid):
    """Return the process and all its descendants."""
    children = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += path.read_text().split()
    return [pid, *(each for child in children for each in tree(child))]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("n1", False)],
)
def test_loopback_addresses(host, expected):
    assert is_loopback(host) == expected


@pytest.mark.slow
def test_a_loader_worker_does_not_keep_the_port_of_its_run():
    with forks.own_port() as port:
        words = [sys.executable, "-c", KEEPS_THE_PORT, port]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stdout.split()) == (0, ["value", "free"]), done.stderr


def _meet(rank, port, host):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    with process_group(CPU, 60.0) as ranks:
        assert ranks.sum_numbers([1.0]) == [2.0]
        found = listening([os.getpid()])
        ranks.gather(b"every rank has looked")
    return found


def _call(pipe, *arguments):
    forks.prepare()
    pipe.send(_meet(*arguments))


@pytest.mark.parametrize("host", ["127.0.0.1", slow("localhost")])
def test_ranks_at_a_loopback_address_listen_there_alone(host):
    context, answers = forks.server(), []
    with forks.own_port() as port:
        processes = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_call, args=(theirs, rank, port, host)))
            processes[-1].start()
            theirs.close()
            answers.append(ours)
        found = [answer.recv() for answer in answers]
    for process in processes:
        process.join()
    assert all(found), "a rank listens nowhere: this test looks in the wrong place"
    assert all(is_loopback(address) for each in found for address in each), found


@pytest.mark.slow
def test_the_ranks_that_a_benchmark_starts_listen_at_loopback_addresses(tmp_path):
    options = [
        *("model=autoencoder", "model.hidden=[16,6]", "kfac=none", "logger=none"),
        *("trainer.max_steps=100000", "trainer.threads=1", "run_id=run", f"runs_dir={tmp_path}"),
    ]
    process = subprocess.Popen(
        local_runs.local_command(options, 2), cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        found = set()
        events = tmp_path / "run/events.jsonl"
        while not (events.exists() and '"Trained"' in events.read_text()):
            assert process.poll() is None
            found |= listening(tree(process.pid))
            time.sleep(0.05)
        found |= listening(tree(process.pid))
    finally:
        process.terminate()
        assert process.wait(60) != 0
    assert found
    assert all(is_loopback(address) for address in found), found
    assert '"interrupted"' in events.read_text()


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_is_not_set_is_named(monkeypatch, name):
    for each in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(each, "127.0.0.1" if each == "MASTER_ADDR" else "1")
    monkeypatch.delenv(name)
    with pytest.raises(OneRankError, match=f"{name} is not set"), process_group(CPU, 60.0):
        pass
