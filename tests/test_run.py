"""A run from configuration to weights: recorded, stopped, taken up again bit-exactly, refused."""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import signal
import threading
import time
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
import yaml

import kfac_bench
from kfac_bench import checkpoint, cli, compose, dry_run, run
from kfac_bench import trainer as trainer_module
from kfac_bench.errors import UsageError
from kfac_bench.events import (
    Checkpointed,
    Evaluated,
    EventLog,
    Resumed,
    RunEnded,
    RunStarted,
    TargetReached,
    Trained,
    read,
)
from kfac_bench.ranks import Ranks
from kfac_bench.run_directory import RunDirectory, run_id
from kfac_bench.tasks.classification import Classification
from kfac_bench.tasks.reconstruction import Reconstruction
from kfac_bench.trainer import Trainer, weights_sha256
from tests.distributed import run_ranks

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)
EPOCH = 5
"""Steps: 1347 digits in batches of 256."""

SMALL = (
    *("model=autoencoder", "model.hidden=[16,6]", "logger=none", "trainer.threads=1"),
    "trainer.checkpoint_freq=5",
)
KFAC = ("optimizer.lr=0.05", "kfac.update_freq=4", "kfac.factor_update_freq=2")
METHODS = {
    "kfac eigen": (*KFAC, "kfac.method=eigen"),
    "kfac inverse": (*KFAC, "kfac.method=inverse", "kfac.damping=0.03"),
    "adam": ("optimizer=adam", "kfac=none"),
}


def config_of(folder, *overrides, base=SMALL):
    return compose.load([*base, f"runs_dir={folder}", *overrides])


def train(folder, *overrides, base=SMALL, ranks=ALONE):
    """Run; the status and the run directory."""
    config = config_of(folder, *overrides, base=base)
    status, _ = run.train(config, ranks)
    return status, RunDirectory(config).path


def of_kind(path, kind):
    return [e for e in read(path) if isinstance(e, kind)]


def steps_of(path, kind):
    return [e.step for e in of_kind(path, kind)]


def end(path):
    return of_kind(path, RunEnded)[-1]


@contextlib.contextmanager
def before_step(number, action):
    """Call ``action(trainer)`` before the update with that number, in this process."""
    original = Trainer._train_step

    def step(self, batch):
        if self.step + 1 == number:
            action(self)
        return original(self, batch)

    Trainer._train_step = step
    try:
        yield
    finally:
        Trainer._train_step = original


def terminate(_):
    os.kill(os.getpid(), signal.SIGTERM)


def kill(_):
    raise RuntimeError("killed")  # nothing is written any more, as after SIGKILL


@contextlib.contextmanager
def loss_is(value, number, task=Reconstruction):
    """The training loss of step ``number`` is ``value``, in this process."""
    original, calls = task.loss, [0]

    def loss(self, model, batch):
        calls[0] += 1
        return original(self, model, batch) * (value if calls[0] == number else 1.0)

    task.loss = loss
    try:
        yield
    finally:
        task.loss = original


# ---- what a run leaves behind ----


def test_a_run_directory_tells_the_whole_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    status, path = train(tmp_path, *KFAC, "trainer.max_epochs=2", "trainer.log_freq=4")
    config = config_of(tmp_path, *KFAC, "trainer.max_epochs=2", "trainer.log_freq=4")
    assert status == "finished"
    assert path.parent == tmp_path
    assert yaml.safe_load((path / "config.yaml").read_text()) == asdict(config)

    about = json.loads((path / "run.json").read_text())
    assert about["run_id"] == path.name
    assert re.fullmatch(r"([0-9a-f]{40}(\+changes)?)?", about["git_commit"])
    assert about["versions"]["torch"] == torch.__version__.partition("+")[0] or (
        about["versions"]["torch"] == torch.__version__
    )
    assert about["versions"]["kfac_bench"] == kfac_bench.__version__
    assert about["hardware"]["cpu"]
    assert about["hardware"]["cpu_count"] == os.cpu_count()
    assert about["hardware"]["threads"] == 1
    assert (about["world_size"], about["device"]) == (1, "cpu")
    assert about["slurm_job_id"] == "4711"

    lines = [json.loads(x) for x in (path / "events.jsonl").read_text().splitlines()]
    kinds = [x["event"] for x in lines]
    assert kinds[0] == "RunStarted"
    assert kinds[-1] == "RunEnded"
    assert lines[0]["config"] == asdict(config)
    assert lines[0]["environment"] == {k: v for k, v in about.items() if k != "run_id"}
    assert steps_of(path, Evaluated) == [0, 5, 10]
    assert steps_of(path, Trained) == [4, 8, 10]
    assert steps_of(path, Checkpointed) == [5, 10]
    assert [e.epoch for e in of_kind(path, Evaluated)] == [0, 1, 2]
    seconds = [x["train_s"] for x in lines]
    assert seconds == sorted(seconds)
    last = of_kind(path, Trained)[-1]
    assert 0 < last.nu <= 1
    assert last.stage_s
    assert last.lr == 0.05
    assert of_kind(path, Trained)[0].cosine

    found, bad = checkpoint.find(path)
    assert (found.step, bad) == (10, [])
    for e in of_kind(path, Checkpointed):
        assert (path / "checkpoints" / f"step-{e.step:08d}").samefile(e.path)
    files = {p.name for p in path.iterdir()}
    assert files == {"config.yaml", "run.json", "events.jsonl", "checkpoints", ".lock"}


def test_training_learns_and_the_last_weights_are_the_checkpoint(tmp_path):
    fast = (*METHODS["adam"], "optimizer.lr=0.01", "trainer.max_epochs=4")
    _, path = train(tmp_path, *fast)
    errors = [e.metrics["squared_error"] for e in of_kind(path, Evaluated)]
    assert errors[-1] < 0.7 * errors[0]
    trainer = trainer_of(tmp_path, *fast)
    assert weights_sha256(trainer.model) != end(path).weights_sha256
    trainer.restore(checkpoint.find(path)[0])
    assert weights_sha256(trainer.model) == end(path).weights_sha256
    assert trainer.step == 20
    assert trainer.clock.train_s() == pytest.approx(of_kind(path, Checkpointed)[-1].train_s, abs=1)


def trainer_of(folder, *overrides, base=SMALL, ranks=ALONE):
    """A trainer that writes no events."""
    config = config_of(folder, *overrides, base=base)
    return run._build_trainer(config, ranks, RunDirectory(config))


@pytest.mark.parametrize("limit", [3, 7])
def test_no_more_steps_than_max_steps(tmp_path, limit):
    status, path = train(tmp_path, f"trainer.max_steps={limit}", "trainer.log_freq=1")
    assert status == "finished"
    assert steps_of(path, Trained) == list(range(1, limit + 1))
    assert end(path).step == limit
    assert checkpoint.find(path)[0].step == limit
    assert steps_of(path, Evaluated)[-1] == limit


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ((), 20 * EPOCH),
        (("trainer.max_steps=333",), 333),
        (("trainer.max_epochs=30",), 30 * EPOCH),
        (("trainer.max_steps=12", "trainer.max_epochs=2"), 2 * EPOCH),
        (("trainer.max_steps=9", "trainer.max_epochs=2"), 9),
    ],
)
def test_the_lower_limit_counts(tmp_path, limits, steps):
    assert trainer_of(tmp_path, *limits).max_steps == steps


def test_checkpoints_at_epoch_ends_at_most_once_a_minute(tmp_path, monkeypatch):
    often = ("trainer.checkpoint_freq=null", "trainer.max_steps=12")
    _, path = train(tmp_path, *often)
    assert steps_of(path, Checkpointed) == [12]
    monkeypatch.setattr(trainer_module, "CHECKPOINT_INTERVAL_S", 0.0)
    _, path = train(tmp_path, *often, "run_id=r")
    assert steps_of(path, Checkpointed) == [5, 10, 12]


def test_same_seed_same_weights_and_another_seed_others(tmp_path):
    shas = [
        end(train(tmp_path, f"seed={seed}", f"run_id={name}", "trainer.max_steps=5")[1])
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    a, b, c = (e.weights_sha256 for e in shas)
    assert re.fullmatch("[0-9a-f]{64}", a)
    assert a == b != c


def test_target_stops_the_run(tmp_path):
    status, path = train(tmp_path, *METHODS["adam"], "trainer.target=12", "trainer.eval_freq=2")
    assert status == "reached"
    [hit] = of_kind(path, TargetReached)
    assert hit.value <= 12 == hit.target
    assert hit.step == end(path).step == checkpoint.find(path)[0].step
    evaluated = of_kind(path, Evaluated)
    assert all(e.metrics["squared_error"] > 12 for e in evaluated[:-1])


# ---- the same command again ----


def test_the_same_command_again_says_complete_and_trains_nothing(tmp_path, capsys):
    _, path = train(tmp_path, "trainer.max_steps=5")
    before = (path / "events.jsonl").read_bytes()
    capsys.readouterr()
    with before_step(1, kill):
        assert train(tmp_path, "trainer.max_steps=5") == ("finished", path)
    said = capsys.readouterr().out
    assert "is complete (finished at step 5)" in said
    assert str(path) in said
    assert (path / "events.jsonl").read_bytes() == before


def test_a_reached_run_is_complete_and_goes_on_for_a_better_target(tmp_path, capsys):
    options = (*METHODS["adam"], "run_id=r", "trainer.eval_freq=1")
    _, path = train(tmp_path, *options, "trainer.target=15")
    first = end(path).step
    assert train(tmp_path, *options, "trainer.target=15")[0] == "reached"
    assert "is complete (reached" in capsys.readouterr().out
    assert train(tmp_path, *options, "trainer.target=12")[0] == "reached"
    assert steps_of(path, Resumed) == [first]
    assert end(path).step > first


def test_more_steps_with_the_same_run_id_continue_the_run(tmp_path):
    options = (*METHODS["kfac eigen"], "run_id=mine")
    _, path = train(tmp_path, *options, "trainer.max_steps=5")
    with before_step(5, kill):  # nothing before step 6 is done again
        assert train(tmp_path, *options, "trainer.max_steps=15") == ("finished", path)
    assert steps_of(path, Resumed) == [5]
    assert len(of_kind(path, RunStarted)) == 1
    _, straight = train(tmp_path, *METHODS["kfac eigen"], "run_id=other", "trainer.max_steps=15")
    assert end(path).weights_sha256 == end(straight).weights_sha256
    assert "max_steps: 15" in (path / "config.yaml").read_text()


def test_the_run_id_is_a_function_of_what_is_run(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    name = run_id(config_of(tmp_path))
    assert name.startswith("digits-autoencoder-sgd-kfac_comm_opt-")
    assert run_id(config_of(tmp_path / "x", "logger=tensorboard", "dry_run=true")) == name
    others = ("seed=1", "kfac.damping=0.1", "trainer.max_steps=9", "kfac=none", "data.workers=1")
    ids = {run_id(config_of(tmp_path, o)) for o in others}
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert len({name, *ids, run_id(config_of(tmp_path))}) == 2 + len(others)
    for bad in ("a/b", "..", "a b", "'a\nb'", "x" * 101, "''"):
        with pytest.raises(UsageError) as caught:
            run_id(config_of(tmp_path, f"run_id={bad}"))
        assert len(str(caught.value).splitlines()) == 1


# ---- stopped and taken up again ----

LONG = ("trainer.max_steps=15", "trainer.log_freq=1", "trainer.eval_freq=6")


@pytest.mark.parametrize("step", [3, 7])  # mid-epoch; between decompositions at 0, 4, 8, 12
@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_run_ends_with_the_same_weights(tmp_path, method, step):
    options = (*METHODS[method], *LONG)
    _, straight = train(tmp_path, *options, "run_id=straight")
    with before_step(step, terminate):
        status, path = train(tmp_path, *options, "run_id=stopped")
    assert status == "interrupted"
    assert end(path).step == checkpoint.find(path)[0].step == step
    handler = signal.getsignal(signal.SIGTERM)
    assert handler in (signal.SIG_DFL, signal.default_int_handler), "the handler was left behind"
    assert train(tmp_path, *options, "run_id=stopped")[0] == "finished"
    assert end(path).weights_sha256 == end(straight).weights_sha256
    assert steps_of(path, Resumed) == [step]
    assert [e.loss for e in of_kind(path, Trained)] == [e.loss for e in of_kind(straight, Trained)]
    assert [e.metrics for e in of_kind(path, Evaluated)] == [
        e.metrics for e in of_kind(straight, Evaluated)
    ]


RESNET = ("model=resnet8", "trainer.batch_size=64", "logger=none", "trainer.threads=1")


def test_an_interrupted_run_with_batch_norm_ends_with_the_same_weights(tmp_path):
    options = (*KFAC, "trainer.max_steps=7", "trainer.eval_freq=3")
    _, straight = train(tmp_path, *options, "run_id=straight", base=RESNET)
    with before_step(5, terminate):
        train(tmp_path, *options, "run_id=stopped", base=RESNET)
    with before_step(7, terminate):
        train(tmp_path, *options, "run_id=stopped", base=RESNET)
    _, path = train(tmp_path, *options, "run_id=stopped", base=RESNET)
    assert end(path).weights_sha256 == end(straight).weights_sha256


def test_a_signal_sets_the_exit_code_and_a_finished_step_is_not_lost(tmp_path, capsys):
    command = [*SMALL, "trainer.max_steps=10", f"runs_dir={tmp_path}", "run_id=r"]
    with before_step(2, terminate), pytest.raises(SystemExit) as caught:
        cli.train(command)
    assert caught.value.code == 128 + signal.SIGTERM
    assert end(tmp_path / "r").status == "interrupted"
    with pytest.raises(SystemExit) as caught:
        cli.train(command)
    assert caught.value.code == 0


def test_events_of_a_killed_run_after_its_last_checkpoint_are_void(tmp_path):
    options = (*METHODS["adam"], *LONG, "trainer.checkpoint_freq=4", "run_id=r")
    with before_step(8, kill), pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, *options)
    path = tmp_path / "r"
    assert steps_of(path, Trained) == [1, 2, 3, 4, 5, 6, 7]
    assert train(tmp_path, *options)[0] == "finished"
    assert steps_of(path, Resumed) == [4]
    trained = steps_of(path, Trained)
    assert trained == sorted(set(trained)) == list(range(1, trained[-1] + 1))
    assert steps_of(path, Evaluated)[:3] == [0, 6, 12]
    raw = (path / "events.jsonl").read_text()
    assert raw.count('"event": "Evaluated", "step": 6') == 2, "the record is append-only"


def test_killed_before_the_first_checkpoint_it_starts_anew(tmp_path):
    options = (*METHODS["adam"], *LONG, "run_id=r")
    with before_step(3, kill), pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, *options)
    _, path = train(tmp_path, *options)
    assert of_kind(path, Resumed) == []
    assert steps_of(path, Trained)[:4] == [1, 2, 3, 4]
    _, straight = train(tmp_path, *METHODS["adam"], *LONG)
    assert end(path).weights_sha256 == end(straight).weights_sha256


def test_a_line_torn_by_a_kill_does_not_spoil_the_record(tmp_path):
    options = (*METHODS["adam"], *LONG, "run_id=r")
    with before_step(8, kill), pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, *options)
    path = tmp_path / "r"
    with (path / "events.jsonl").open("a") as file:
        file.write('{"event": "Trained", "st')
    assert train(tmp_path, *options)[0] == "finished"
    assert steps_of(path, Resumed) == [5]
    assert steps_of(path, Trained)[:10] == list(range(1, 11))
    assert end(path).status == "finished"


def test_a_damaged_checkpoint_costs_steps_not_the_run(tmp_path, capsys):
    options = (*METHODS["kfac eigen"], *LONG, "trainer.checkpoint_freq=3")
    with before_step(8, kill), pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, *options, "run_id=r")
    newest = tmp_path / "r" / "checkpoints" / "step-00000006" / "rank0.pt"
    newest.write_bytes(newest.read_bytes()[:-9])
    capsys.readouterr()
    _, path = train(tmp_path, *options, "run_id=r")
    assert "step-00000006/rank0.pt: damaged" in capsys.readouterr().out
    assert steps_of(path, Resumed) == [3]
    _, straight = train(tmp_path, *options, "run_id=straight")
    assert end(path).weights_sha256 == end(straight).weights_sha256


# ---- resume=PATH ----


def test_resume_starts_from_another_run(tmp_path):
    options = METHODS["kfac eigen"]
    _, first = train(tmp_path, *options, "trainer.max_steps=5", "run_id=first")
    _, straight = train(tmp_path, *options, "trainer.max_steps=10", "run_id=straight")
    newest = first / "checkpoints" / "step-00000005"
    for name, path in (("b", first), ("c", newest)):
        more = ("trainer.max_steps=10", f"run_id={name}", f"resume={path}")
        _, second = train(tmp_path, *options, *more)
        assert steps_of(second, Resumed) == [5]
        assert end(second).step == 10
        assert end(second).weights_sha256 == end(straight).weights_sha256
        assert len(of_kind(second, RunStarted)) == 1
    assert end(first).step == 5, "the other run was written to"


def test_an_interrupted_run_goes_on_from_its_own_checkpoint_not_from_resume(tmp_path):
    _, first = train(tmp_path, "trainer.max_steps=5", "run_id=first")
    more = ("trainer.max_steps=15", "run_id=second", f"resume={first}")
    with before_step(8, terminate):
        train(tmp_path, *more)
    _, second = train(tmp_path, *more)
    assert [e.step for e in of_kind(second, Resumed)] == [5, 8]


def test_settings_are_those_of_the_new_run_after_resume(tmp_path):
    adam = ("optimizer=adam", "kfac=none", "trainer.log_freq=1")
    _, first = train(tmp_path, *adam, "trainer.max_steps=5", "run_id=first", "optimizer.lr=0.01")
    more = ("optimizer.lr=0.002", "optimizer.beta1=0.5", "trainer.max_steps=10")
    _, second = train(tmp_path, *adam, *more, "run_id=second", f"resume={first}")
    assert {e.lr for e in of_kind(second, Trained)} == {0.002}
    groups = checkpoint.find(second)[0].shards[0]["optimizer"]["param_groups"]
    assert groups[0]["betas"] == (0.5, 0.999)


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (["resume=/nowhere/at/all"], "resume=/nowhere/at/all"),
        (["resume={first}", "model.hidden=[9]", "kfac=none"], "another model"),
        (["resume={first}", "model.hidden=[9]"], "K-FAC state"),
        (["resume={first}", "optimizer=adam"], "optimizer"),
    ],
)
def test_what_cannot_be_resumed_is_refused_in_a_line(tmp_path, overrides, fragment):
    _, first = train(tmp_path, *KFAC, "trainer.max_steps=5", "run_id=first")
    told = [o.format(first=first) for o in overrides]
    with pytest.raises(UsageError) as caught:
        train(tmp_path, *KFAC, "run_id=second", *told)
    assert fragment in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "to", [("kfac.method=inverse",), ("kfac=none",), ("kfac=layer_wise", "kfac.damping=0.01")]
)
def test_resume_with_another_preconditioner(tmp_path, to):
    _, first = train(tmp_path, *METHODS["kfac eigen"], "trainer.max_steps=5", "run_id=first")
    status, second = train(
        tmp_path, *KFAC, *to, "trainer.max_steps=10", "run_id=second", f"resume={first}"
    )
    assert status == "finished"
    assert all(math.isfinite(e.loss) for e in of_kind(second, Trained))


# ---- refused ----


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("kfac.damping=0.5", "kfac.damping=0.001, not 0.5"),
        ("seed=7", "seed=0, not 7"),
        ("model.hidden=[16]", "model.hidden"),
        ("optimizer=adam", "optimizer."),
        ("trainer.batch_size=128", "trainer.batch_size=256, not 128"),
    ],
)
def test_another_configuration_under_the_same_run_id_is_refused(tmp_path, option, said):
    _, path = train(tmp_path, "run_id=mine", "trainer.max_steps=5")
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    with pytest.raises(UsageError) as caught:
        train(tmp_path, "run_id=mine", "trainer.max_steps=5", option)
    assert said in str(caught.value)
    assert "another run_id" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before


def test_what_does_not_change_the_run_may_change(tmp_path):
    _, path = train(tmp_path, "run_id=mine", "trainer.max_steps=5")
    more = ("trainer.log_freq=2", "trainer.keep_last=3", "trainer.eval_freq=2", "data.root=/x")
    status, _ = train(tmp_path, "run_id=mine", "trainer.max_steps=10", *more)
    assert (status, end(path).step) == ("finished", 10)


def test_a_directory_in_use_is_refused(tmp_path):
    config = config_of(tmp_path, "run_id=mine", "trainer.max_steps=5")
    with RunDirectory(config).open(config, {}), pytest.raises(UsageError, match="another process"):
        run.train(config, ALONE)
    assert run.train(config, ALONE)[0] == "finished", "the lock outlived its holder"


def test_where_nothing_can_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write here"):
        train(tmp_path / "file", "trainer.max_steps=5")


def test_a_config_that_cannot_be_read_is_refused(tmp_path):
    _, path = train(tmp_path, "run_id=mine", "trainer.max_steps=5")
    (path / "config.yaml").write_text("trainer: [")
    with pytest.raises(UsageError, match=r"config\.yaml: cannot be read"):
        train(tmp_path, "run_id=mine", "trainer.max_steps=5")


# ---- the training clock ----


def test_the_training_clock_stands_still_in_evaluation_and_checkpoints(tmp_path, monkeypatch):
    real, save = Reconstruction.totals, checkpoint.save

    def slow_totals(self, model, batch):
        time.sleep(0.1)
        return real(self, model, batch)

    def slow_save(*arguments):
        time.sleep(0.1)
        return save(*arguments)

    monkeypatch.setattr(Reconstruction, "totals", slow_totals)
    monkeypatch.setattr(checkpoint, "save", slow_save)
    real_statistics = kfac_bench.core.KFAC.statistics

    def slow_statistics(self):
        time.sleep(0.1)
        return real_statistics(self)

    monkeypatch.setattr(kfac_bench.core.KFAC, "statistics", slow_statistics)
    often = ("trainer.eval_freq=1", "trainer.checkpoint_freq=1", "trainer.log_freq=1")
    began = time.perf_counter()
    _, path = train(tmp_path, *KFAC, *often, "trainer.max_steps=5")
    assert time.perf_counter() - began > 1.6
    assert 0 < end(path).train_s < 0.5
    assert all(e.write_s > 0.1 for e in of_kind(path, Checkpointed))
    with before_step(3, lambda _: time.sleep(0.5)):
        _, path = train(tmp_path, *KFAC, "trainer.max_steps=5", "run_id=slow")
    assert end(path).train_s > 0.5, "the clock stands still in training"


def test_the_training_clock_goes_on_after_resume(tmp_path):
    options = ("trainer.max_steps=10", "run_id=r")
    with before_step(2, lambda t: (time.sleep(0.4), terminate(t))):
        _, path = train(tmp_path, *options)
    time.sleep(0.5)
    train(tmp_path, *options)
    assert 0.4 < end(path).train_s < 0.8
    [resumed] = of_kind(path, Resumed)
    assert resumed.train_s >= 0.4


# ---- numbers that are none ----


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("method", ["kfac eigen", "adam"])
def test_a_loss_that_is_no_number_stops_the_run_before_the_update(tmp_path, method, value):
    options = (*METHODS[method], "trainer.max_steps=10", "trainer.log_freq=1")
    _, before = train(tmp_path, *METHODS[method], "trainer.max_steps=5", "run_id=before")
    with loss_is(value, 6):
        status, path = train(tmp_path, *options, "run_id=r")
    assert status == end(path).status == "failed"
    assert f"the loss is {value} at step 6; no update was made" in end(path).message
    assert end(path).step == 5
    assert end(path).weights_sha256 == end(before).weights_sha256
    good, bad = checkpoint.find(path)
    assert (good.step, bad) == (5, [])
    assert train(tmp_path, *options, "run_id=r")[0] == "finished", "it cannot be taken up again"


def test_a_failed_run_has_exit_code_1(tmp_path, capsys):
    with loss_is(math.nan, 2), pytest.raises(SystemExit) as caught:
        cli.train([*SMALL, f"runs_dir={tmp_path}", "trainer.max_steps=5"])
    assert caught.value.code == 1
    assert "step 2" in capsys.readouterr().out


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_never_saved(tmp_path, value):
    def spoil(trainer):
        trainer.optimizer.step = lambda: next(trainer.model.parameters()).data.fill_(value)

    options = ("trainer.max_steps=20", "trainer.checkpoint_freq=4", "run_id=r")
    with before_step(8, spoil):
        status, path = train(tmp_path, *options)
    assert status == "failed"
    assert "weight" in end(path).message
    assert "8" in end(path).message
    good, bad = checkpoint.find(path)
    assert (good.step, bad) == (4, [])
    assert all(torch.isfinite(x).all() for x in good.shards[0]["model"].values())


# ---- several ranks ----


def here():
    return Ranks(dist.get_rank(), dist.get_world_size(), CPU)


def train_here(folder, overrides, base=SMALL, stop=None, nan=None):
    """On every rank: train; SIGTERM or a NaN loss on one of them.

    Status, what was printed, and the hash of this rank's parameters.
    """
    ranks = here()
    config = config_of(folder, *overrides, base=base)
    printed, trainers, build = io.StringIO(), [], run._build_trainer

    def keep(*arguments):
        trainers.append(build(*arguments))
        return trainers[-1]

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(printed))
        if stop is not None and stop[0] == ranks.rank:
            stack.enter_context(before_step(stop[1], terminate))
        if nan is not None and nan[0] == ranks.rank:
            stack.enter_context(loss_is(math.nan, nan[1]))
        run._build_trainer = keep
        stack.callback(setattr, run, "_build_trainer", build)
        status, _ = run.train(config, ranks)
    parameters = torch.cat([p.detach().flatten() for p in trainers[0].model.parameters()])
    return status, printed.getvalue(), hashlib.sha256(parameters.numpy()).hexdigest()


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("strategy", ["comm_opt", "layer_wise"])
def test_an_interrupted_run_on_two_ranks_ends_with_the_same_weights(tmp_path, strategy, method):
    options = (*KFAC, f"kfac={strategy}", f"kfac.method={method}")
    options += ("trainer.max_steps=10", "trainer.log_freq=1")
    run_ranks(2, train_here, tmp_path, (*options, "run_id=straight"))
    stopped = run_ranks(2, train_here, tmp_path, (*options, "run_id=stopped"), SMALL, (1, 7))
    assert [s[0] for s in stopped] == ["interrupted", "interrupted"]
    done = run_ranks(2, train_here, tmp_path, (*options, "run_id=stopped"))
    assert [s[0] for s in done] == ["finished", "finished"]
    straight, path = tmp_path / "straight", tmp_path / "stopped"
    assert steps_of(path, Resumed) == [7]
    assert end(path).weights_sha256 == end(straight).weights_sha256
    assert [e.loss for e in of_kind(path, Trained)] == [e.loss for e in of_kind(straight, Trained)]
    assert done[1][1] == "", "rank 1 talks"
    assert done[0][2] == done[1][2], "the ranks' weights differ"
    assert len(checkpoint.find(path)[0].shards) == 2
    assert json.loads((path / "run.json").read_text())["world_size"] == 2
    again = run_ranks(2, train_here, tmp_path, (*options, "run_id=stopped"))
    assert [s[0] for s in again] == ["finished", "finished"]
    assert "is complete" in again[0][1]


@pytest.mark.ranks
def test_an_interrupted_run_with_batch_norm_on_two_ranks(tmp_path):
    options = (*KFAC, "trainer.max_steps=6", "trainer.eval_freq=2")
    run_ranks(2, train_here, tmp_path, (*options, "run_id=straight"), RESNET)
    run_ranks(2, train_here, tmp_path, (*options, "run_id=stopped"), RESNET, (0, 3))
    run_ranks(2, train_here, tmp_path, (*options, "run_id=stopped"), RESNET)
    straight, path = tmp_path / "straight", tmp_path / "stopped"
    assert steps_of(path, Resumed) == [3]
    assert end(path).weights_sha256 == end(straight).weights_sha256


@pytest.mark.ranks
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    options = (*KFAC, "run_id=r")
    run_ranks(2, train_here, tmp_path, (*options, "trainer.max_steps=5"))
    _, path = train(tmp_path, *options, "trainer.max_steps=10")
    run_ranks(2, train_here, tmp_path, (*options, "trainer.max_steps=15"))
    _, alone = train(tmp_path, *KFAC, "run_id=alone", "trainer.max_steps=15")
    assert steps_of(path, Resumed) == [5, 10]
    ours, theirs = (of_kind(p, Evaluated)[-1].metrics["squared_error"] for p in (path, alone))
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.ranks
def test_a_loss_that_is_no_number_on_one_rank_stops_both(tmp_path):
    options = ("trainer.max_steps=10", "run_id=r", *KFAC)
    results = run_ranks(2, train_here, tmp_path, options, SMALL, None, (1, 7))
    assert [r[0] for r in results] == ["failed", "failed"]
    path = tmp_path / "r"
    assert "at step 7" in end(path).message
    assert end(path).step == 6
    assert checkpoint.find(path)[0].step == 5


def evaluate_here(folder, saved, examples):
    """On every rank: the validation figures for saved weights, other buffers on each rank."""
    ranks = here() if dist.is_initialized() else ALONE
    trainer = trainer_of(folder, base=RESNET, ranks=ranks)
    trainer.restore(checkpoint.load(saved))
    for buffer in trainer._bare.buffers():
        if buffer.is_floating_point():
            buffer.add_(ranks.rank)
    seen = []

    class Keep:
        def write(self, event):
            seen.append(event)

    trainer.log = EventLog([Keep()])
    if examples is not None:
        trainer.data.eval_size = examples
    trainer._evaluate()
    return seen[0].metrics


@pytest.mark.ranks
def test_validation_figures_are_exact_on_any_number_of_ranks(tmp_path):
    _, path = train(tmp_path, *KFAC, "trainer.max_steps=21", base=RESNET)
    saved = checkpoint.find(path)[0].path
    for examples in (None, 3):  # 450 do not divide by 4; 3 leave a rank without any
        alone = evaluate_here(tmp_path, saved, examples)
        if examples is None:
            assert alone == of_kind(path, Evaluated)[-1].metrics
            assert 0.2 < alone["accuracy"] < 1
            assert alone["accuracy"] * 450 == pytest.approx(round(alone["accuracy"] * 450))
        for world in (2, 4):
            for metrics in run_ranks(world, evaluate_here, tmp_path, saved, examples):
                assert metrics["accuracy"] == alone["accuracy"]
                assert metrics["loss"] == pytest.approx(alone["loss"], rel=1e-6, abs=1e-8)


def test_the_figure_counts_every_example_once_in_batches_of_any_size(tmp_path):
    figures = []
    for size in (1000, 450, 7):
        trainer = trainer_of(tmp_path, f"trainer.eval_batch_size={size}", base=RESNET)
        counted = []
        original = Classification.totals
        trainer.task.totals = lambda m, b: counted.append(len(b[1])) or original(trainer.task, m, b)  # noqa: B023
        seen = []
        trainer.log.emit = seen.append
        trainer._evaluate()
        assert sum(counted) == 450
        figures.append(seen[0].metrics["accuracy"])
    assert len(set(figures)) == 1


def refused_here(folder, overrides, lock):
    """On every rank: what run.train says, within some seconds."""
    ranks, outcome = here(), []
    config = config_of(folder, *overrides)

    def attempt():  # signals are for the main thread: fit would not work here
        with contextlib.ExitStack() as stack:
            if lock and ranks.is_main:
                stack.enter_context(RunDirectory(config).open(config, {}))
            try:
                outcome.append(run.train(config, ranks))
            except BaseException as error:
                outcome.append((type(error).__name__, str(error)))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(10)
    assert outcome, "hangs: rank 0 has given up"
    return outcome[0]


@pytest.mark.ranks
@pytest.mark.parametrize("reason", ["lock", "configuration", "resume"])
def test_bad_input_is_refused_on_all_ranks(tmp_path, reason):
    options = ["trainer.max_steps=5", "run_id=mine"]
    train(tmp_path, *options)
    options += {
        "lock": [],
        "configuration": ["seed=3"],
        "resume": ["run_id=new", "resume=/nowhere"],
    }[reason]
    outcomes = run_ranks(2, refused_here, tmp_path, options, reason == "lock")
    assert [kind for kind, _ in outcomes] == ["UsageError", "UsageError"]
    assert len(outcomes[0][1].splitlines()) == 1


def divided_here(folder):
    with pytest.raises(UsageError, match="batch_size 255 is not divisible by the 2 ranks"):
        run.train(config_of(folder, "trainer.batch_size=255"), here())


@pytest.mark.ranks
def test_a_batch_that_ranks_cannot_share_is_refused(tmp_path):
    run_ranks(2, divided_here, tmp_path)


def test_a_full_disk_ends_the_run_with_a_line_not_a_traceback(tmp_path, monkeypatch):
    def full(*args, **keywords):
        raise OSError("checkpoint step-00000005: No space left on device")

    monkeypatch.setattr(trainer_module.checkpoint, "save", full)
    config = config_of(tmp_path, "trainer.max_steps=6")
    assert run.train(config, ALONE)[0] == "failed"
    ended = read(RunDirectory(config).path)[-1]
    assert isinstance(ended, RunEnded)
    assert "No space left on device; older checkpoints are untouched" in ended.message


@pytest.mark.parametrize("entry", ["run", "dry_run"])
def test_batch_norm_of_one_example_is_refused(tmp_path, entry):
    config = config_of(tmp_path, "trainer.batch_size=1", base=("logger=none",))
    with pytest.raises(UsageError, match="needs two examples per rank"):
        run.train(config, ALONE) if entry == "run" else dry_run.describe(config)
    alone_is_fine = config_of(tmp_path, "trainer.batch_size=1", "trainer.max_steps=2")
    assert run.train(alone_is_fine, ALONE)[0] == "finished"  # an autoencoder has none


@pytest.mark.parametrize(("rank", "said"), [(0, ""), (1, "kfac-train: rank 1: a.JPEG: corrupt\n")])
def test_a_sample_that_one_rank_alone_met_is_named(tmp_path, monkeypatch, capsys, rank, said):
    def fit(self):
        raise UsageError("a.JPEG: corrupt")

    monkeypatch.setattr(Trainer, "fit", fit)
    with pytest.raises(UsageError, match=r"a\.JPEG"):  # rank 0's is printed by the command
        run.train(config_of(tmp_path), Ranks(rank, 1, CPU))
    assert capsys.readouterr().err == said
