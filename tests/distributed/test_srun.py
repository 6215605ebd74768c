"""Ranks from Slurm's variables, and a run that gets Slurm's notice. These tests need no Slurm.

`make slurm-test` runs further tests with a real Slurm.
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from kfac_bench.benchmark import grid, local_runs, slurm_jobs
from kfac_bench.benchmark.grid import Cell
from kfac_bench.distributed import slurm_rank
from kfac_bench.distributed.backend import find_device
from kfac_bench.errors import OneRankError, UsageError
from kfac_bench.record.events import Evaluated, Resumed
from kfac_bench.stop_signals import SIGNALS
from kfac_bench.training import checkpoint
from kfac_bench.training.run_directory import RunDirectory
from kfac_bench.training.trainer import Trainer
from tests.support.runs import KFAC, before_step, config_of, end, kill, of_kind, steps_of, train

BATCH_SHELL = {
    "SLURM_CLUSTER_NAME": "test",
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
"""The variables as Slurm 22.05 sets them."""
TASK = BATCH_SHELL | {
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def adopted(environ):
    environ = dict(environ)
    slurm_rank.adopt(environ)
    return {name: environ[name] for name in TORCH if name in environ}


def test_a_task_of_srun_becomes_a_rank():
    found = adopted(TASK)
    port = int(found.pop("MASTER_PORT"))
    assert list(found.values()) == ["3", "4", "1", "2", "node1"]
    assert 12000 <= port < 32000
    assert adopted(TASK | {"SLURM_PROCID": "0"})["MASTER_PORT"] == str(port)
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_CLUSTER_NAME"):
        assert adopted(TASK | {name: "4"})["MASTER_PORT"] != str(port)
    nameless = {k: v for k, v in TASK.items() if k != "SLURM_CLUSTER_NAME"}
    assert 12000 <= int(adopted(nameless)["MASTER_PORT"]) < 32000


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH_SHELL,  # kfac-train in a batch script without srun is a single process
        TASK | {"SLURM_STEP_NUM_TASKS": "1"},
        TASK | {"HOROVOD_RANK": "1"},
    ],
)
def test_other_processes_do_not_become_ranks(environ):
    assert adopted(environ) == {}


def test_variables_of_torchrun_win_over_those_of_srun():
    torchrun = dict(zip(TORCH, ("1", "8", "1", "4", "elsewhere", "1"), strict=True))
    assert adopted(TASK | torchrun) == torchrun
    for name, value in (("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "5")):
        assert adopted(TASK | {name: value})[name] == value


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[1-2]", "node1"),
        ("a1", "a1"),
        ("gpu[02-04,7],x", "gpu02"),
        ("a[7,3]", "a7"),
        ("r[1-2]n[05-16]-ib", "r1n05-ib"),
        ("b,a[1-2]", "b"),
    ],
)
def test_first_host_returns_the_first_node_of_a_list(nodes, first):
    assert slurm_rank.first_host(nodes) == first


def test_tasks_per_node_expands_the_short_form():
    assert slurm_rank.tasks_per_node("2(x3),1") == (2, 2, 2, 1)


def test_a_task_that_sees_only_its_own_gpu_takes_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name in [n for n in os.environ if n.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    with pytest.raises(OneRankError, match="no GPU is left for local rank 1"):
        find_device("auto", 1)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    with pytest.raises(OneRankError, match="no GPU is left"):
        find_device("auto", 1)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    assert find_device("auto", 1) == torch.device("cuda", 0)


def test_submit_without_slurm_is_a_usage_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="--launcher slurm: there is no sbatch on this machine"):
        slurm_jobs.submit({"a": ["true"]}, ["true"], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/slurm: cannot be written"):
        slurm_jobs.submit({"a": ["true"]}, ["true"], tmp_path / "file")
    with pytest.raises(UsageError, match=r"sbatch takes no backslash in the path"):
        slurm_jobs.submit({"a": ["true"]}, ["true"], tmp_path / "a\\b")


def test_patterns_of_sbatch_in_a_path_stay_what_they_are():
    """tests/slurm/test_submit.py submits from such a folder to a real Slurm."""
    assert slurm_jobs.pattern(Path("100%j/a%%")) == "100%%j/a%%%%"


LONG = (*KFAC, "trainer.max_steps=8", "trainer.log_freq=1", "trainer.eval_freq=4")


def notice_in_evaluation(monkeypatch, step):
    """Raise SIGUSR1 in the evaluation after `step` steps."""
    original, within = (Trainer._evaluate, Trainer._to_device), []

    def evaluate(self):
        within.append(self.step)
        try:
            return original[0](self)
        finally:
            within.pop()

    def to_device(self, batch):
        if within == [step]:
            signal.raise_signal(signal.SIGUSR1)
        return original[1](self, batch)

    monkeypatch.setattr(Trainer, "_evaluate", evaluate)
    monkeypatch.setattr(Trainer, "_to_device", to_device)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 4, 8])
def test_an_interrupted_evaluation_is_repeated_after_the_restart(tmp_path, monkeypatch, step):
    _, straight = train(tmp_path, *LONG, "run_id=straight")
    with monkeypatch.context() as patch:
        notice_in_evaluation(patch, step)
        status, path = train(tmp_path, *LONG, "run_id=stopped")
    assert (status, end(path).status, end(path).step) == ("interrupted", "interrupted", step)
    assert step not in steps_of(path, Evaluated)
    assert (path / "state").read_text() == f"interrupted {step} {path}\n"
    saved, _ = checkpoint.find(path)
    assert (0 if saved is None else saved.step) == step
    assert train(tmp_path, *LONG, "run_id=stopped")[0] == "finished"
    assert steps_of(path, Resumed) == ([step] if step else [])
    assert steps_of(path, Evaluated) == steps_of(straight, Evaluated) == [0, 4, 8]
    assert [e.metrics for e in of_kind(path, Evaluated)] == [
        e.metrics for e in of_kind(straight, Evaluated)
    ]
    assert end(path).weights_sha256 == end(straight).weights_sha256
    assert (path / "state").read_text() == f"finished 8 {path}\n"


def test_a_repeated_evaluation_that_reaches_the_target_ends_the_run(tmp_path, monkeypatch):
    options = (
        *LONG,
        "trainer.target=100",
        "run_id=r",
    )  # a squared error that the first evaluation reaches
    _, path = train(tmp_path, *LONG, "trainer.max_steps=4", "run_id=r")
    with monkeypatch.context() as patch:
        notice_in_evaluation(patch, 8)
        train(tmp_path, *LONG, "run_id=r")
    assert end(path).status == "interrupted"
    assert train(tmp_path, *options)[0] == "reached"
    assert steps_of(path, Evaluated) == [0, 4, 8]


def test_an_evaluation_that_is_repeated_twice_counts_once(tmp_path, monkeypatch):
    """A notice in an evaluation, and then a kill before the next checkpoint."""
    words = (*LONG, "trainer.checkpoint_freq=100", "trainer.predictions=0", "run_id=r")
    with monkeypatch.context() as patch:
        notice_in_evaluation(patch, 4)
        _, path = train(tmp_path, *words)
    with before_step(6, kill), pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, *words)
    assert steps_of(path, Evaluated) == [0, 4]
    assert train(tmp_path, *words)[0] == "finished"
    assert steps_of(path, Resumed) == [4, 4]
    assert steps_of(path, Evaluated) == [0, 4, 8]


def test_the_state_file_of_the_batch_script_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("KFAC_STATE_FILE", str(tmp_path / "job.state"))
    _, path = train(tmp_path, *LONG, "trainer.max_steps=2", "run_id=r")
    assert (tmp_path / "job.state").read_text() == f"finished 2 {path}\n"
    (tmp_path / "job.state").unlink()
    train(tmp_path, *LONG, "trainer.max_steps=2", "run_id=r")  # this run is complete already
    assert (tmp_path / "job.state").read_text() == f"finished 2 {path}\n"
    assert not list(tmp_path.rglob("*.partial"))
    monkeypatch.setenv("KFAC_STATE_FILE", "/nowhere/job.state")
    RunDirectory(config_of(tmp_path, "run_id=r")).note_state("running", 3)  # no error
    assert (path / "state").read_text() == f"running 3 {path}\n"


def test_the_state_of_one_run_is_not_that_of_a_job_with_several(tmp_path, monkeypatch):
    """Otherwise a study that fails, or gets a notice between two runs, ends as if it were done."""
    state = tmp_path / "job.state"
    monkeypatch.setenv("KFAC_STATE_FILE", str(state))
    cell = Cell("a", (), folder=tmp_path / "a")
    for code, is_kept in ((0, False), (1, False), (128 + signal.SIGUSR1, True)):
        state.write_text("finished 2 a\n")
        monkeypatch.setattr(local_runs, "train_forked", lambda words, code=code: (code, "done"))
        assert grid.train(cell) == (code, f"kfac-train: done (exit code {code})")
        assert state.exists() is is_kept


def test_batch_scripts_find_their_folder_with_cdpath_set():
    script = 'source slurm/common.sh; echo "$folder"'
    environ = {"SLURM_JOB_NAME": "a", "SLURM_JOB_ID": "7", "CDPATH": ".:/"}
    root = Path(__file__).parents[2]
    found = subprocess.check_output(
        ["bash", "-c", script], env=os.environ | environ, text=True, cwd=root
    )
    assert found == f"{root / 'slurm'}\n"


def test_a_requeued_job_takes_another_port():
    environ = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "n1",
    }
    first = slurm_rank.SlurmTask.of(environ).port
    again = slurm_rank.SlurmTask.of(environ | {"SLURM_RESTART_COUNT": "1"}).port
    assert first != again
    assert again == slurm_rank.SlurmTask.of(environ | {"SLURM_RESTART_COUNT": "1"}).port


TORCHRUN = (Path(__file__).parents[2] / "slurm" / "torchrun.sbatch").read_text()


def test_a_requeued_job_of_torchrun_takes_another_port():
    (line,) = re.findall(r"^port=.*$", TORCHRUN, re.MULTILINE)
    ports = [
        subprocess.check_output(
            ["bash", "-c", f'{line}; echo "$port"'],
            env=os.environ | {"SLURM_JOB_ID": "65432"} | restarts,
            text=True,
        )
        for restarts in ({}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "2"})
    ]
    assert len(set(ports)) == 3
    assert {12000 <= int(port) < 32000 for port in ports} == {True}
    assert '--rdzv-endpoint "$first:$port"' in TORCHRUN


def test_torchrun_forwards_all_signals_that_a_run_obeys():
    (names,) = re.findall(r"--signals-to-handle (\S+)", TORCHRUN)
    assert {signal.Signals[name] for name in names.split(",")} == {*SIGNALS}
