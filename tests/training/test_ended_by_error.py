"""Whatever ends a run, its record and the file `state` end too."""

import multiprocessing
import os
import signal
import socket

import numpy as np
import pytest
from PIL import Image

from kfac_bench.cli.entry import exit_with
from kfac_bench.distributed.backends.ddp import process_group
from kfac_bench.errors import OneRankError, WorkerLostError
from tests.support import forks
from tests.support.runs import CPU, before_step, end, train

BASE = (
    *("model=autoencoder", "model.hidden=[12,4]", "data=imagefolder", "data.image_size=4"),
    *("logger=none", "trainer.threads=1", "trainer.batch_size=8", "trainer.max_steps=30"),
    *("trainer.checkpoint_freq=4", "kfac=none", "run_id=run", "trainer.predictions=0"),
)


@pytest.fixture
def root(tmp_path):
    for split, count in (("train", 240), ("val", 6)):
        for i in range(count):
            path = tmp_path / "data" / split / f"class{i % 2}" / f"{i:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((6, 5, 3), i, np.uint8)).save(path)
    return tmp_path / "data"


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


@pytest.mark.parametrize("rank", [0, 1])
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
