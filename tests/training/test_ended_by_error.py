"""Whatever ends a run, its record and the file `state` end too."""

import contextlib
import errno
import io
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kfac_bench.cli.entry import exit_with
from kfac_bench.distributed.backends.ddp import process_group
from kfac_bench.distributed.ranks import lost_rank
from kfac_bench.errors import OneRankError, WorkerLostError, shortage
from tests.support import forks
from tests.support.quick import slow
from tests.support.runs import CPU, before_step, end, train, write_pictures

BASE = (
    *("model=autoencoder", "model.hidden=[12,4]", "data=imagefolder", "data.image_size=4"),
    *("logger=none", "trainer.threads=1", "trainer.batch_size=8", "trainer.max_steps=30"),
    *("trainer.checkpoint_freq=4", "kfac=none", "run_id=run", "trainer.predictions=0"),
)


@pytest.fixture
def root(tmp_path):
    return write_pictures(tmp_path / "data", "{:03}.png", train=240, val=6)


def state(tmp_path):
    return (tmp_path / "run" / "state").read_text().split()[0]


def _with_a_killed_worker(folder, root):
    def kill_worker(_):
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    with before_step(6, kill_worker), pytest.raises(WorkerLostError) as caught:
        train(folder, f"data.root={root}", "data.workers=2", base=BASE)
    return str(caught.value)


def test_a_killed_loader_worker_is_one_line(tmp_path, root):
    said = forks.call(_with_a_killed_worker, tmp_path, root)
    assert said.startswith("a process that reads data died")
    assert "data.workers" in said
    assert "\n" not in said
    ended = end(tmp_path / "run")
    assert (ended.status, state(tmp_path)) == ("failed", "failed")
    assert ended.message


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_ends_the_record(tmp_path, root, workers):
    path = root / "train/class1/201.png"
    path.write_bytes(path.read_bytes()[:30])
    options = (f"data.root={root}", f"data.workers={workers}")
    with pytest.raises(OneRankError, match=r"201\.png cannot be read: .*data\.changed=accept"):
        train(tmp_path, *options, base=BASE)
    ended = end(tmp_path / "run")
    assert (ended.status, state(tmp_path)) == ("failed", "failed")
    assert "201.png cannot be read" in ended.message


def test_a_second_ctrl_c_ends_the_record(tmp_path, root):
    def stop(_):
        raise KeyboardInterrupt

    with before_step(3, stop), pytest.raises(KeyboardInterrupt):
        train(tmp_path, f"data.root={root}", "data.workers=0", base=BASE)
    assert (end(tmp_path / "run").status, state(tmp_path)) == ("interrupted", "interrupted")


def test_a_lost_worker_is_exit_code_1(capsys):
    def fail():
        raise WorkerLostError("killed by signal: Killed. ")

    with pytest.raises(SystemExit) as caught:
        exit_with("kfac-train", fail)
    assert caught.value.code == 1
    assert capsys.readouterr().err.endswith("need less memory. killed by signal: Killed.\n")


def test_a_text_that_ends_a_program_of_the_user_is_its_line(capsys):
    with pytest.raises(SystemExit) as stop:
        exit_with("kfac-train", lambda: sys.exit("no data\nhere"))
    assert stop.value.code == 1
    assert capsys.readouterr().err == "kfac-train: no data here\n"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.slow
def test_a_port_in_use_ends_every_rank_within_the_timeout(rank):
    with socket.socket() as stranger:
        stranger.bind(("", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        process = forks.server().Process(target=_meet, args=(rank, port))
        process.start()
        process.join(60)
        assert process.exitcode == (2 if rank == 0 else 1)


def _meet(rank, port):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)

    def meet():
        with process_group(CPU, 1.0):
            return 0

    exit_with("kfac-train", meet)


def _limit_memory():
    """Leave this process 64 MB of new memory, as ulimit -v does."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))


def _use_memory(_):
    _limit_memory()
    torch.zeros(1 << 28)


def _refuse_threads(_):
    # A thread needs more memory for its stack now than the limit leaves.
    threading.stack_size(1 << 28)
    _limit_memory()


SHORT_OF = {"memory": _use_memory, "threads": _refuse_threads}


def _with_a_shortage(folder, root, what, workers):
    said = io.StringIO()
    options = (f"data.root={root}", f"data.workers={workers}")
    with (
        contextlib.redirect_stderr(said),
        before_step(3, SHORT_OF[what]),
        pytest.raises(SystemExit) as caught,
    ):
        exit_with("kfac-train", lambda: train(folder, *options, base=BASE))
    return caught.value.code, said.getvalue()


@pytest.mark.parametrize(("what", "workers"), [slow("memory", 0), ("memory", 2), ("threads", 0)])
def test_a_shortage_is_one_line_and_ends_the_record(tmp_path, root, what, workers):
    code, said = forks.call(_with_a_shortage, tmp_path, root, what, workers)
    assert code == 1
    # torch may warn about more workers than cores.
    (line,) = (each for each in said.splitlines() if each.startswith("kfac-train: "))
    assert line.startswith("kfac-train: the machine or a limit")
    assert what in line
    assert "Traceback" not in said
    ended = end(tmp_path / "run")
    assert (ended.status, state(tmp_path)) == ("failed", "failed")
    assert what in ended.message


# The kernel exempts root from ulimit -u, so the run belongs to another user, who may use the files
# of root.
AS_ANOTHER_USER = (
    *("setpriv", "--reuid=54321", "--clear-groups"),
    *("--inh-caps=+dac_override", "--ambient-caps=+dac_override", "prlimit", "--nproc=2"),
)


@pytest.mark.slow
def test_a_limit_of_processes_is_one_line(tmp_path, root):
    """At two processes and threads, the loader's second worker cannot start."""
    if shutil.which("setpriv") is None or subprocess.run([*AS_ANOTHER_USER, "true"]).returncode:
        pytest.skip("this user may not become another one with setpriv")
    done = subprocess.run(
        [
            *AS_ANOTHER_USER,
            *(sys.executable, "-m", "kfac_bench", *BASE),
            *(f"data.root={root}", "data.workers=2", f"runs_dir={tmp_path}"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    (line,) = (each for each in done.stderr.splitlines() if each.startswith("kfac-train: "))
    assert done.returncode == 1
    assert "allows no more threads or processes" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (MemoryError(), "more memory"),
        (RuntimeError("Storage size calculation overflowed with sizes=[4, 1]"), "more memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "more memory"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "threads or processes"),
        (OSError(errno.EMFILE, "Too many open files"), "files are open"),
        (RuntimeError("unable to write to file </torch_1>: No space left on device (28)"), "df -i"),
        (RuntimeError("an error of the program"), None),
        (OSError(errno.ENOENT, "No such file or directory"), None),
    ],
)
def test_what_counts_as_a_shortage(error, what):
    line = shortage(error)
    assert (line is None) == (what is None)
    assert what is None or what in line


def test_a_lost_rank_without_a_message_is_one_line():
    assert lost_rank(torch.distributed.DistNetworkError()) == "DistNetworkError"
    assert lost_rank(torch.distributed.DistBackendError("\nno route. This is typically ...")) == (
        "no route"
    )
    assert lost_rank(RuntimeError()) is None
