"""Launches: a run survives killed ranks and nodes, and reports errors in one line."""

import contextlib
import json
import os
import signal
import socket
import time

import pytest
import torch.distributed as dist

from kfac_bench import distributed
from kfac_bench.core.distributed.collective import TorchCollective
from kfac_bench.data.image_options import DigitsConfig
from kfac_bench.distributed.options import DDPConfig
from kfac_bench.errors import LostRanksError, UsageError
from kfac_bench.record.events import Resumed, Trained
from kfac_bench.training import build
from kfac_bench.training.build import build_optimizer
from tests.reliability.faults import launch
from tests.support.agents import PATIENCE_S, Agent
from tests.support.distributed import run_ranks
from tests.support.forks import own_port
from tests.support.quick import slow
from tests.support.runs import (
    KFAC,
    SMALL,
    config_of,
    end,
    here,
    of_kind,
    steps_of,
    train,
    train_here,
)

STABLE = (*KFAC, "optimizer.lr=0.02", "kfac.damping=0.1", "kfac.spread=false")
LONG = (
    "trainer.max_steps=200",
    "trainer.log_freq=1",
    "trainer.eval_freq=200",
    "trainer.checkpoint_freq=25",
)
"""A run of some seconds, so that a test can kill it in between."""


@pytest.fixture
def port():
    with own_port() as port:
        yield port


@contextlib.contextmanager
def started(*agents):
    """Kill the agents and their ranks at the end of the block."""
    try:
        yield agents
    finally:
        for agent in agents:
            agent.kill()


def wait_for_port(port):
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with socket.socket() as one:
            if one.connect_ex(("localhost", int(port))) == 0:
                return
        assert time.monotonic() < deadline, f"nobody listens on port {port}"
        time.sleep(0.1)


def wait_for_checkpoint(path, step):
    deadline = time.monotonic() + PATIENCE_S
    while not (path / f"checkpoints/step-{step:08d}/manifest.json").exists():
        assert time.monotonic() < deadline, f"no checkpoint of step {step}"
        time.sleep(0.02)


@pytest.mark.alone
@pytest.mark.ranks
def test_a_killed_rank_loses_only_steps_since_the_last_checkpoint(tmp_path):
    options = (*SMALL, *STABLE, *LONG, "run_id=killed", "kfac=mem_opt")
    restarts = ("--nproc-per-node", "2", "--max-restarts", "3")
    path = tmp_path / "runs" / "killed"
    with started(Agent(tmp_path, restarts, options)) as [agent]:
        for rank, step in ((1, 25), (0, 100)):
            wait_for_checkpoint(path, step)
            os.kill(agent.rank(rank), signal.SIGKILL)
        assert agent.exit_code() == 0, agent.said
        said = agent.said
    run_ranks(2, train_here, tmp_path, (*STABLE, *LONG, "run_id=straight", "kfac=mem_opt"))
    straight = tmp_path / "straight"
    assert end(path).weights_sha256 == end(straight).weights_sha256
    assert [e.loss for e in of_kind(path, Trained)] == [e.loss for e in of_kind(straight, Trained)]
    assert steps_of(path, Trained) == list(range(1, 201))
    raw = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    resumed = [e["step"] for e in raw if e["event"] == "Resumed"]
    assert resumed[0] >= 25
    assert resumed[1] >= 100
    assert len(resumed) == 2
    assert said.count("kfac-train: rank 0: lost another rank") == 1
    assert "Traceback" not in said
    assert not list(path.glob("checkpoints/.*"))


@pytest.mark.alone
@pytest.mark.ranks
@pytest.mark.supports("ddp", "resume on another world size")
def test_the_other_nodes_go_on_after_one_is_lost(tmp_path, port):
    calm = (
        *STABLE,
        *LONG,
        "optimizer.lr=0.002",
        "kfac.damping=1.0",
    )  # small differences stay small
    options = (*SMALL, *calm, "run_id=elastic")
    elastic = [
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-id=job",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3",
    ]
    path = tmp_path / "runs" / "elastic"
    first = Agent(tmp_path, elastic, options)
    # The first agent must hold the rendezvous, because the second one will be killed.
    wait_for_port(port)
    second = Agent(tmp_path, elastic, options)
    with started(first, second):
        wait_for_checkpoint(path, 25)
        assert json.loads((path / "run.json").read_text())["world_size"] == 2
        second.kill()
        assert first.exit_code() == 0, first.said
    assert json.loads((path / "run.json").read_text())["world_size"] == 2, "of the first start"
    assert of_kind(path, Resumed)[-1].environment["world_size"] == 1
    assert steps_of(path, Trained) == list(range(1, 201))
    assert steps_of(path, Resumed)
    _, alone = train(tmp_path, *calm, "run_id=alone")
    ours, theirs = ([e.loss for e in of_kind(p, Trained)] for p in (path, alone))
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_with_different_options_end_with_one_line(tmp_path):
    options = [*SMALL, f"runs_dir={tmp_path}/runs", "seed=${oc.env:RANK}"]
    ended = launch.by_hand(tmp_path, 2, options)
    assert ended.codes == [2, 2]
    said = ended.errors.splitlines()
    assert said == ["kfac-train: ranks [1] have other options than rank 0. Use one command for all"]


@pytest.mark.parametrize("agent", [slow(False), True])
def test_waiting_for_a_missing_rank_ends_after_the_timeout(monkeypatch, port, agent):
    """Rank 0 of two keeps the store, or torchrun's agent keeps it."""
    store = agent and dist.TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False)
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in (world | {"TORCHELASTIC_USE_AGENT_STORE": str(agent)}).items():
        monkeypatch.setenv(name, value)
    begin = time.monotonic()
    with pytest.raises(LostRanksError), distributed.join(DDPConfig("ddp", timeout_s=1), "cpu"):
        pass
    assert time.monotonic() - begin > 0.5
    del store


# ---- errors of one rank, reported by all ----


def refused_here(folder, spoil, *overrides):
    """Call `spoil`, train, and return the error of the run, on every rank."""
    from kfac_bench.training import run

    backend = here()
    config = spoil(backend.ranks.rank, folder, config_of(folder, *overrides)) or config_of(
        folder, *overrides
    )
    try:
        run.train(config, backend)
    except UsageError as error:
        return str(error)
    finally:
        DigitsConfig.build = REAL_BUILD
    return None


REAL_BUILD = DigitsConfig.build


def another_learning_rate(rank, folder, config):
    config.optimizer.lr += rank
    return config


def other_workers(rank, folder, config):
    config.data.workers = rank
    config.trainer.max_steps = 2
    return config


def no_data(rank, folder, config):
    def missing(*_):
        raise UsageError("no folder /data: \u00fcber")

    if rank == 1:
        DigitsConfig.build = missing


def less_data(rank, folder, config):
    def cut(*arguments):
        data = REAL_BUILD(*arguments)
        data.train_size -= rank
        return data

    DigitsConfig.build = cut


def another_folder(rank, folder, config):
    config.runs_dir = str(folder / f"runs{rank}")
    return config


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("spoil", "fragment"),
    [
        (another_learning_rate, "ranks [1] have other options"),
        (no_data, "rank 1: no folder /data: \u00fcber"),
        (less_data, "ranks [1] read other data than rank 0"),
        (another_folder, "rank 1: {folder}/runs1/r is missing on this rank"),
        (other_workers, None),
    ],
)
def test_an_error_of_one_rank_is_reported_by_all(tmp_path, spoil, fragment):
    said = run_ranks(2, refused_here, tmp_path, spoil, "run_id=r")
    assert said[0] == said[1]
    if fragment is None:
        assert said[0] is None
    else:
        assert fragment.format(folder=tmp_path) in said[0]


def other_checkpoints_here(folder):
    """Train where rank 1 finds an older checkpoint of the run."""
    from kfac_bench.training import checkpoint

    backend, find = here(), checkpoint.find
    if backend.ranks.rank == 1:
        checkpoint.find = lambda path: (checkpoint.load(path / "checkpoints/step-00000005"), [])
    try:
        with pytest.raises(UsageError, match=r"ranks \[1\] do not see the checkpoint that rank 0"):
            train(folder, "trainer.max_steps=15", "run_id=r", backend=backend)
    finally:
        checkpoint.find = find


@pytest.mark.ranks
def test_ranks_that_see_different_checkpoints_stop(tmp_path):
    train(tmp_path, "trainer.max_steps=10", "run_id=r")
    run_ranks(2, other_checkpoints_here, tmp_path)


def another_model_here(folder):
    backend = here()
    config = config_of(folder, f"model.hidden=[{8 + backend.ranks.rank}]")
    model = config.model.build((1, 8, 8), 10, "classification")
    optimizer = build_optimizer(config.optimizer, model)
    with pytest.raises(UsageError, match=r"kfac: ranks \[1\] made another K-FAC plan than rank 0"):
        build.build_kfac(config.kfac, model, optimizer, TorchCollective())


@pytest.mark.ranks
def test_a_different_model_on_one_rank_is_an_error_and_no_hang(tmp_path):
    run_ranks(2, another_model_here, tmp_path)
