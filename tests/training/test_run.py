"""One run on one process: its record, when it is complete, its clock, and what is refused."""

import json
import math
import os
import re
import resource
import time
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

import kfac_bench
from kfac_bench import cli
from kfac_bench.config import TrainerConfig
from kfac_bench.config.options import RESULT, option
from kfac_bench.distributed.backend import Backend
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import UsageError
from kfac_bench.record import event_log, runs, score
from kfac_bench.record.event_log import JsonlSink
from kfac_bench.record.events import (
    Checkpointed,
    Evaluated,
    PlanChosen,
    Resumed,
    RunEnded,
    RunStarted,
    TargetReached,
    Trained,
    read,
)
from kfac_bench.tasks.image_tasks import Classification, Reconstruction
from kfac_bench.training import checkpoint, dry_run, run, run_directory, saving, step_results
from kfac_bench.training.rank_batches import RunLength
from kfac_bench.training.run_directory import RunDirectory, run_id
from kfac_bench.training.state import weights_sha256
from kfac_bench.training.trainer import Trainer
from tests.support.quick import slow
from tests.support.runs import (
    ALONE,
    EPOCH,
    KFAC,
    METHODS,
    RESNET,
    SMALL,
    before_step,
    config_of,
    end,
    evaluated,
    kill,
    loss_is,
    of_kind,
    steps_of,
    terminate,
    train,
    trainer_of,
)

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
    assert all(event.cosine for event in of_kind(path, Trained))

    found, bad = checkpoint.find(path)
    assert (found.step, bad) == (10, [])
    for e in of_kind(path, Checkpointed):
        assert (path / "checkpoints" / f"step-{e.step:08d}").samefile(e.path)
    files = {p.name for p in path.iterdir()}
    made = {
        "config.yaml",
        "run.json",
        "state",
        "events.jsonl",
        "checkpoints",
        "predictions",
        ".lock",
    }
    assert files == made


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
    assert trainer_of(tmp_path, *limits).length.max_steps == steps


@pytest.mark.parametrize(
    ("drop_last", "seen", "last"), [(True, 2 * 1280 + 256, 256), (False, 2 * 1347 + 256, 67)]
)
def test_examples_are_counted_with_and_without_a_smaller_last_batch(drop_last, seen, last):
    course = RunLength.of(TrainerConfig(batch_size=256, drop_last=drop_last), 1347)
    assert course.examples_seen(2 * course.steps_per_epoch + 1) == seen
    assert course.next_batch_size(course.steps_per_epoch - 1) == last


def test_checkpoints_at_epoch_ends_at_most_once_a_minute(tmp_path, monkeypatch):
    often = ("trainer.checkpoint_freq=null", "trainer.max_steps=12")
    _, path = train(tmp_path, *often)
    assert steps_of(path, Checkpointed) == [12]
    monkeypatch.setattr(saving, "CHECKPOINT_INTERVAL_S", 0.0)
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


def test_the_hash_of_weights_counts_names():
    layer = nn.Linear(2, 2)
    one, other = (weights_sha256(nn.ModuleDict({name: layer})) for name in "ab")
    assert one != other


@pytest.mark.parametrize("method", ["kfac inverse", "eigen_adam"])
def test_a_choice_within_a_budget_is_recorded_once_and_kept(tmp_path, capsys, method):
    ample = (*METHODS[method], "kfac.max_overhead=1000")
    _, path = train(tmp_path, *ample, "trainer.max_steps=8")
    _, again = train(tmp_path, *ample, "trainer.max_steps=10", f"resume={path}")
    (chosen,) = of_kind(path, PlanChosen)
    assert of_kind(again, PlanChosen) == []
    options = {"max_dim": 8192, "block_size": None, "factor_update_freq": 2, "update_freq": 4}
    assert (chosen.step, chosen.options) == (6, options)
    first, resumed = "".join(capsys.readouterr()).split("resumed at step 8")
    assert first.count("more time per step with max_dim=8192") == 1
    assert resumed.count("more time per step with max_dim=8192") == 1


def test_a_budget_that_cannot_be_met_ends_the_run_with_a_line(tmp_path):
    with pytest.raises(UsageError, match=r"kfac: max_overhead=1e-09 cannot be met: the cheapest"):
        train(tmp_path, *KFAC, "kfac.max_overhead=1e-9")


def test_target_stops_the_run(tmp_path):
    status, path = train(tmp_path, *METHODS["adam"], "trainer.target=12", "trainer.eval_freq=2")
    assert status == "reached"
    [hit] = of_kind(path, TargetReached)
    assert hit.value <= 12 == hit.target
    assert hit.step == end(path).step == checkpoint.find(path)[0].step
    events = of_kind(path, Evaluated)
    assert all(e.metrics["squared_error"] > 12 for e in events[:-1])


def test_initial_weights_that_meet_the_target_need_no_step(tmp_path):
    options = (*METHODS["kfac eigen"], "run_id=r")
    assert train(tmp_path, *options, "trainer.target=1000")[0] == "reached"
    path = tmp_path / "r"
    [hit] = of_kind(path, TargetReached)
    assert (hit.step, hit.train_s, end(path).step) == (0, 0.0, 0)
    assert not of_kind(path, Trained)
    assert train(tmp_path, *options, "trainer.target=1000")[0] == "reached"
    assert (path / "state").read_text().startswith("reached 0 ")
    # The checkpoint of step 0 continues for a better target.
    more = ("trainer.target=18", "trainer.eval_freq=1")
    assert train(tmp_path, *options, *more)[0] == "reached"
    assert end(path).step > 0


def test_the_metric_counts_every_example_once_in_batches_of_any_size(tmp_path):
    figures = []
    for size in (1000, 450, 7):
        trainer = trainer_of(tmp_path, f"trainer.eval_batch_size={size}", base=RESNET)
        counted = []
        original = Classification.totals
        trainer.task.totals = lambda m, b: counted.append(len(b[1])) or original(trainer.task, m, b)  # noqa: B023
        figures.append(evaluated(trainer)["accuracy"])
        assert sum(counted) == 450
    assert len(set(figures)) == 1


def test_a_metric_belongs_to_the_checkpoint_of_its_own_step(tmp_path):
    options = ("trainer.eval_freq=4", "trainer.checkpoint_freq=2", "trainer.keep_last=9")
    _, path = train(tmp_path, *options, "trainer.keep_best=1", "trainer.max_steps=8")
    measured = {e.step: e.metrics["squared_error"] for e in of_kind(path, Evaluated)}
    found = {}
    for manifest in path.glob("checkpoints/step-*/manifest.json"):
        said = json.loads(manifest.read_text())
        found[said["step"]] = said["metric"]["value"] if said.get("metric") else None
    assert found == {2: None, 4: measured[4], 6: None, 8: measured[8]}


def test_an_evaluation_after_a_restart_gives_its_metric_to_the_checkpoint(tmp_path):
    options = ("run_id=r", "trainer.max_steps=5", "kfac=none")
    with before_step(5, terminate):
        train(tmp_path, *options)
    assert checkpoint.find_best(tmp_path / "r") == (None, [])
    _, path = train(tmp_path, *options)
    saved, _ = checkpoint.find_best(path)
    assert saved is not None
    assert saved.step == end(path).step == 5


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


def test_a_run_that_reached_its_target_continues_only_for_a_better_target(tmp_path, capsys):
    options = (*METHODS["adam"], "run_id=r", "trainer.eval_freq=1")
    _, path = train(tmp_path, *options, "trainer.target=15")
    first = end(path).step
    assert train(tmp_path, *options, "trainer.target=15")[0] == "reached"
    assert "is complete (reached" in capsys.readouterr().out
    # It has reached an easier target, too.
    assert train(tmp_path, *options, "trainer.target=16")[0] == "reached"
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
    assert "max_steps: 5" in (path / "config.yaml").read_text(), "of the first start"
    (resumed,) = of_kind(path, Resumed)
    assert resumed.options == {"trainer.max_steps": 15}
    assert resumed.environment["versions"]["torch"]


def test_the_run_id_depends_on_result_and_place_options_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    name = run_id(config_of(tmp_path))
    assert name.startswith("digits-autoencoder-sgd-kfac_comm_opt-")
    assert run_id(config_of(tmp_path / "x", "logger=tensorboard", "dry_run=true")) == name
    assert run_id(config_of(tmp_path, "trainer.predictions=0", "trainer.log_freq=1")) == name
    others = (
        *("seed=1", "kfac.damping=0.1", "trainer.max_steps=9", "kfac=none", "data.workers=1"),
        *("model.weights=/x", "resume=/x", "trainer.threads=2"),
    )
    ids = {run_id(config_of(tmp_path, o)) for o in others}
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert len({name, *ids, run_id(config_of(tmp_path))}) == 2 + len(others)
    for bad in ("a/b", "..", "a b", "'a\nb'", "x" * 101, "''"):
        with pytest.raises(UsageError) as caught:
            run_id(config_of(tmp_path, f"run_id={bad}"))
        assert len(str(caught.value).splitlines()) == 1


def test_an_option_of_a_later_version_changes_no_run_id_while_at_its_default(tmp_path):
    @dataclass
    class LaterTrainerConfig(TrainerConfig):
        new: int = option(3, "an option that a later version has", RESULT)

    config = config_of(tmp_path)
    later = replace(config, trainer=LaterTrainerConfig(**asdict(config.trainer)))
    assert run_id(later) == run_id(config)
    later.trainer.new = 4
    assert run_id(later) != run_id(config)


def test_a_changed_default_changes_no_run_id_of_equal_values(tmp_path):
    @dataclass
    class LaterTrainerConfig(TrainerConfig):
        log_freq: int = option(7, "an option with a new default", RESULT, original=10)

    config = config_of(tmp_path)
    values = asdict(config.trainer) | {"log_freq": 10}
    later = replace(config, trainer=LaterTrainerConfig(**values))
    assert run_id(later) == run_id(config)
    later.trainer.log_freq = 7  # at the new default, and not what it was
    assert run_id(later) != run_id(config)


def test_seeds_that_differ_in_place_and_record_are_one_row(tmp_path):
    short = ("trainer.max_steps=5", *KFAC)
    _, part = train(tmp_path / "part", *KFAC, "trainer.max_steps=2")
    for options in (("seed=0",), ("seed=1", "trainer.predictions=0"), ("seed=2", f"resume={part}")):
        train(tmp_path / "whole", *short, *options)
    [setting] = runs.group(runs.load(file) for file in runs.find(tmp_path / "whole"))
    assert score.row(setting).seeds == 3


# ---- refused ----


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("kfac.damping=0.5", "kfac.damping=None, not 0.5"),
        ("seed=7", "seed=0, not 7"),
        ("model.hidden=[16]", "model.hidden"),
        ("optimizer=adam", "optimizer.name=sgd, not adam"),
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


def test_a_run_continues_with_other_place_and_record_options(tmp_path):
    _, path = train(tmp_path, "run_id=mine", "trainer.max_steps=5")
    more = ("trainer.log_freq=2", "trainer.keep_last=3", "trainer.eval_freq=2", "resume=/x")
    status, _ = train(tmp_path, "run_id=mine", "trainer.max_steps=10", *more)
    assert (status, end(path).step) == ("finished", 10)


def old_config(path, **changes):
    """Rewrite config.yaml of a run as another version wrote it; None removes an option."""
    config = yaml.safe_load((path / "config.yaml").read_text())
    for name, value in changes.items():
        group, key = name.split("__")
        if value is None:
            del config[group][key]
        else:
            config[group][key] = value
    (path / "config.yaml").write_text(yaml.safe_dump(config))


def test_a_run_of_an_old_version_with_one_named_logger_goes_on(tmp_path):
    _, path = train(tmp_path, "run_id=mine", "trainer.max_steps=5")
    old_config(path, logger__name="wandb", logger__csv=None, logger__wandb=None)
    status, _ = train(tmp_path, "run_id=mine", "trainer.max_steps=10")
    assert (status, end(path).step) == ("finished", 10)


def test_a_run_of_an_old_version_goes_on_with_a_newer_option_at_its_default(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    options = (*KFAC, "trainer.max_steps=7")
    with before_step(6, kill), pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, *options)
    begun = RunDirectory(config_of(tmp_path, *options)).path
    old_config(begun, trainer__drop_last=None, kfac__spread=None, data__root=None)
    status, path = train(tmp_path, *options)
    assert (status, path) == ("finished", begun)
    assert steps_of(path, Resumed) == [5]


def test_a_newer_option_that_is_not_at_its_default_is_refused(tmp_path):
    _, path = train(tmp_path, "run_id=mine", "trainer.max_steps=5")
    old_config(path, trainer__drop_last=None)
    with pytest.raises(
        UsageError, match=r"holds a run with trainer.drop_last=True, not False\. Set"
    ):
        train(tmp_path, "run_id=mine", "trainer.max_steps=5", "trainer.drop_last=false")


@pytest.mark.parametrize("name", ["trainer__target_of_old", "kfac__strategy2", "backend__nam"])
def test_an_option_that_this_version_does_not_have_is_refused_in_a_line(tmp_path, name):
    """A known name at its beginning, such as ``trainer.target``, makes no difference."""
    _, path = train(tmp_path, "run_id=mine", "trainer.max_steps=5")
    old_config(path, **{name: 3})
    dotted = name.replace("__", ".")
    expected = f"holds a run with {dotted}=3, which this version does not have. Set another run_id"
    with pytest.raises(UsageError, match=expected) as caught:
        train(tmp_path, "run_id=mine", "trainer.max_steps=5")
    assert len(str(caught.value).splitlines()) == 1


def test_nodes_may_differ_in_places_and_processors_alone(tmp_path):
    def common(*options):
        seen = []
        run._check_same_options(
            config_of(tmp_path, *options), SimpleNamespace(unlike_main=seen.append)
        )
        return seen

    for may_differ in (
        *("data.workers=1", "resume=/x"),
        *("trainer.device=cpu", "trainer.pin=true"),
        *("trainer.threads=3", "logger=tensorboard", "logger.mode=offline", "runs_dir=/x"),
    ):
        assert common(may_differ) == common(), may_differ
    for must_agree in ("seed=1", "trainer.log_freq=1", "kfac=mem_opt", "run_id=x", "label=x"):
        assert common(must_agree) != common(), must_agree


def test_a_directory_in_use_is_refused(tmp_path, monkeypatch, capsys):
    config = config_of(tmp_path, "run_id=mine", "trainer.max_steps=5")
    monkeypatch.setattr(run_directory, "_PATIENCE_S", 0.3)
    with RunDirectory(config).open(config, {}), pytest.raises(UsageError, match="another process"):
        run.train(config, ALONE)
    assert "another process still runs it; waits up to 0 s" in capsys.readouterr().out
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


def test_a_full_disk_ends_the_run_with_a_line_not_a_traceback(tmp_path, monkeypatch):
    """The writing thread fails; the training notices at a later step, or at the end."""

    def full(*args, **keywords):
        raise OSError(28, "No space left on device")

    for steps, at in ((5, 5), (200, None)):
        monkeypatch.setattr(torch, "save", full)
        config = config_of(tmp_path, f"trainer.max_steps={steps}")
        assert run.train(config, ALONE)[0] == "failed"
        path = RunDirectory(config).path
        ended = read(path)[-1]
        assert isinstance(ended, RunEnded)
        assert re.search(
            r"step-00000005: No space left on device; older checkpoints are untouched$",
            ended.message,
        )
        assert at is None or ended.step == at
        assert ended.step < 11, "another checkpoint was begun"
        assert list((path / "checkpoints").iterdir()) == []
        monkeypatch.undo()
        assert run.train(config, ALONE)[0] == "finished"


@pytest.mark.parametrize("at", ["Trained", "Evaluated", "RunEnded"])
def test_a_record_that_cannot_be_written_ends_the_run_and_nothing_is_lost(tmp_path, at, capsys):
    options = ("trainer.max_steps=15", "trainer.log_freq=3", "trainer.eval_freq=8", "run_id=r")
    real, full = JsonlSink.write, []

    def write(self, event):
        if type(event).__name__ == at and event.step >= 6 and not full:
            full.append(event)
            # The limit is one of the process, so the thread that writes checkpoints must be idle.
            while not list((tmp_path / "r" / "checkpoints").glob("step-*")):
                time.sleep(0.01)
            path = tmp_path / "r" / "events.jsonl"  # the kernel refuses any longer file
            soft = path.stat().st_size + 20
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
            try:
                return real(self, event)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        return real(self, event)

    JsonlSink.write = write
    try:
        status, path = train(tmp_path, *options)
    finally:
        JsonlSink.write = real
    assert status == "failed"
    assert f"{path}/events.jsonl: cannot be written (File too large)" in plain(capsys)
    raw = (path / "events.jsonl").read_text()
    assert all(json.loads(line) for line in raw.splitlines()), "a torn line"
    # The ranks learn of it one step after the step in which the rank sent it.
    last = {"Trained": 8, "Evaluated": 9, "RunEnded": 15}[at]
    assert checkpoint.find(path)[0].step == last
    assert train(tmp_path, *options)[0] == "finished"
    assert steps_of(path, Resumed) == [last]
    assert end(path).status == "finished"


def plain(capsys):
    """Return the printed text in one line, because the terminal's width breaks lines."""
    return "".join(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("entry", ["run", "dry_run"])
def test_batch_norm_of_one_example_is_refused(tmp_path, entry):
    config = config_of(tmp_path, "trainer.batch_size=1", base=("logger=none",))
    with pytest.raises(UsageError, match="needs two examples per rank"):
        run.train(config, ALONE) if entry == "run" else dry_run.trace(config)
    alone_is_fine = config_of(tmp_path, "trainer.batch_size=1", "trainer.max_steps=2")
    assert run.train(alone_is_fine, ALONE)[0] == "finished"  # an autoencoder has none


def test_few_examples_for_batch_norm_are_named(tmp_path, capsys):
    for parts, is_said in ((3, True), (2, False)):
        options = ("trainer.batch_size=32", f"trainer.accumulate={parts}", "trainer.max_steps=1")
        config = config_of(tmp_path, *options, f"run_id={parts}", base=("logger=none",))
        run.train(config, ALONE)
        said = plain(capsys)
        assert ("10 examples of a rank go through the model at a time." in said) == is_said
        assert ("set a larger trainer.batch_size" in said) == is_said


@pytest.mark.parametrize(("rank", "who"), [(None, ""), ("0", "rank 0: "), ("1", "rank 1: ")])
def test_an_unreadable_sample_is_named_by_the_rank_that_read_it(
    tmp_path, monkeypatch, capsys, rank, who
):
    def fit(self):
        raise UsageError("a.JPEG: corrupt")

    monkeypatch.setattr(Trainer, "fit", fit)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as caught:
        cli.train([*SMALL, f"runs_dir={tmp_path}"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"kfac-train: {who}a.JPEG: corrupt\n"


# ---- the training clock ----


class Clocks:
    """The module ``time`` with clocks that move only when a test moves them."""

    wall = cpu = 0.0

    def perf_counter(self):
        return self.wall

    def process_time(self):
        return self.cpu

    def __getattr__(self, name):
        return getattr(time, name)


@pytest.fixture
def clocks(monkeypatch):
    made = Clocks()
    monkeypatch.setattr(step_results, "time", made)
    monkeypatch.setattr(checkpoint.Writer, "cpu_s", lambda _: 0.0)  # is measured in real time
    return made


def test_the_training_clock_is_paused_in_evaluations_and_checkpoints(tmp_path, monkeypatch, clocks):
    taken = []

    def slow(owner, name):
        real = getattr(owner, name)

        def call(*arguments):
            clocks.wall += 100
            taken.append(name)
            return real(*arguments)

        monkeypatch.setattr(owner, name, call)

    slow(Reconstruction, "totals")
    slow(checkpoint.writing, "snapshot")
    slow(kfac_bench.core.KFAC, "statistics")
    slow(event_log.EventLog, "emit")
    often = ("trainer.eval_freq=1", "trainer.checkpoint_freq=1", "trainer.log_freq=1")
    _, path = train(tmp_path, *KFAC, *often, "trainer.max_steps=5")
    assert set(taken) == {"totals", "snapshot", "statistics", "emit"}
    assert end(path).train_s == 0

    def train_slowly(_):
        clocks.wall += 7

    with before_step(3, train_slowly):
        _, path = train(tmp_path, *KFAC, "trainer.max_steps=5", "run_id=slow")
    assert end(path).train_s == 7, "the clock stands still in training"


def test_the_training_clock_continues_after_a_resume(tmp_path, clocks):
    options = ("trainer.max_steps=10", "run_id=r")

    def work_and_stop(trainer):
        clocks.wall += 7
        terminate(trainer)

    with before_step(2, work_and_stop):
        _, path = train(tmp_path, *options)
    clocks.wall += 1000
    train(tmp_path, *options)
    [resumed] = of_kind(path, Resumed)
    assert end(path).train_s == resumed.train_s == 7


def test_a_run_ends_at_the_evaluation_after_its_time_is_up(tmp_path, capsys, clocks):
    often = ("trainer.eval_freq=2", "trainer.max_steps=20", "run_id=r")

    def work(_):
        clocks.wall += 1

    with before_step(3, work):
        status, path = train(tmp_path, *often, "trainer.max_train_s=1")
    assert (status, end(path).step) == ("finished", 4)
    assert steps_of(path, Evaluated) == [0, 2, 4]
    assert train(tmp_path, *often, "trainer.max_train_s=1")[0] == "finished"
    assert "is complete (finished at step 4)" in capsys.readouterr().out
    train(tmp_path, *often, "trainer.max_train_s=100")
    assert end(path).step == 20


CPU_CLOCK = ("trainer.clock=cpu", "trainer.threads=1", "trainer.device=cpu", "trainer.max_steps=8")


def test_the_cpu_clock_counts_work_and_not_sleep(tmp_path, clocks):
    def sleep(_):
        clocks.wall += 2

    def work(trainer):
        clocks.wall += 3
        clocks.cpu += 3
        terminate(trainer)

    with before_step(2, sleep):
        _, path = train(tmp_path, *CPU_CLOCK, "run_id=sleeps")
    assert end(path).train_s == 0
    with before_step(2, work):
        _, path = train(tmp_path, *CPU_CLOCK, "run_id=works")
    assert end(path).train_s == 3
    train(tmp_path, *CPU_CLOCK, "run_id=works")
    assert of_kind(path, Resumed)[0].train_s == end(path).train_s == 3
    assert of_kind(path, RunStarted)[0].config["trainer"]["clock"] == "cpu"


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("trainer.threads=2", "trainer.threads=2: .* set trainer.threads=1"),
        ("trainer.threads=null", "trainer.threads=null"),
        ("data.workers=1", "data.workers=1: .* set data.workers=0"),
    ],
)
def test_the_cpu_clock_needs_one_processor(tmp_path, override, fragment):
    with pytest.raises(UsageError, match=f"trainer.clock=cpu does not fit {fragment}"):
        train(tmp_path, *CPU_CLOCK, override)


@pytest.mark.parametrize(("device", "world_size"), [("cpu", 2), ("cuda", 1)])
def test_the_cpu_clock_needs_one_rank_on_a_cpu(tmp_path, device, world_size):
    ranks = Ranks(torch.device(device), SimpleNamespace(rank=0, world_size=world_size))
    with pytest.raises(UsageError, match=rf"does not fit {world_size} rank\(s\) on {device}"):
        train(tmp_path, *CPU_CLOCK, backend=Backend(ranks))


# ---- numbers that are none ----


READ_AT = {
    "the next step": (),
    "an event": ("trainer.log_freq=6",),
    "an evaluation": ("trainer.eval_freq=6",),
    "a checkpoint": ("trainer.checkpoint_freq=3", "trainer.keep_last=5"),
    "the end": ("trainer.max_steps=6",),
}
"""When a run reads the loss of step 6, and options that make it so."""


@pytest.mark.parametrize(
    ("method", "value", "read_at"),
    [
        *(("kfac eigen", math.nan, read_at) for read_at in READ_AT),
        ("adam", math.inf, "the next step"),
        *(slow("adam", math.nan, read_at) for read_at in READ_AT),
    ],
)
def test_nothing_that_follows_a_loss_that_is_not_finite_is_kept(tmp_path, method, value, read_at):
    rare = ("trainer.max_steps=10", "trainer.log_freq=100", "trainer.eval_freq=100")
    options = (*METHODS[method], *rare, *READ_AT[read_at])
    with loss_is(value, 6):
        status, path = train(tmp_path, *options, "run_id=r")
    saved = 3 if read_at == "a checkpoint" else 5
    assert status == end(path).status == "failed"
    assert end(path).message == (
        f"the loss is {value} at step 6; the weights are lost, and a restart continues from the "
        f"checkpoint of step {saved}"
    )
    assert end(path).weights_sha256 == "", "the hash of weights that the run must not claim"
    assert max(event.step for event in read(path)) == end(path).step == 5
    good, bad = checkpoint.find(path)
    assert (good.step, bad) == (saved, [])
    assert all(torch.isfinite(x).all() for x in good.shards[0]["model"].values())
    assert train(tmp_path, *options, "run_id=r")[0] == "finished"
    _, straight = train(tmp_path, *options, "run_id=straight")
    assert end(path).weights_sha256 == end(straight).weights_sha256


def test_a_loss_that_is_not_finite_before_the_first_checkpoint(tmp_path):
    with loss_is(math.nan, 3):
        _, path = train(tmp_path, "trainer.max_steps=10", "run_id=r")
    assert end(path).message.endswith("a restart begins at step 0")
    assert checkpoint.find(path) == (None, [])


def test_a_failed_run_has_exit_code_1(tmp_path, capsys):
    with loss_is(math.nan, 2), pytest.raises(SystemExit) as caught:
        cli.train([*SMALL, f"runs_dir={tmp_path}", "trainer.max_steps=5"])
    assert caught.value.code == 1
    said = capsys.readouterr().out
    assert "step 2" in said
    [path] = tmp_path.iterdir()
    then = f"next: kfac-bench compare {path}   (what the failed run recorded)"
    assert said.splitlines()[-1] == then
    # A sweep compares its runs also if some of them have failed.
    with loss_is(math.nan, 2), pytest.raises(SystemExit) as caught:
        cli.train(["-m", *SMALL, f"runs_dir={tmp_path / 'sweep'}", "seed=1,2"])
    assert caught.value.code == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("next: kfac-bench compare ")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_never_saved(tmp_path, value):
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
