"""A stopped run continues bit-exactly and notices changed data; resume=PATH starts another run."""

import hashlib
import json
import math
import shutil
import signal

import pytest
import torch

from kfac_bench import cli
from kfac_bench.errors import UsageError
from kfac_bench.record.events import (
    DataChanged,
    Evaluated,
    Resumed,
    RunEnded,
    RunStarted,
    TargetReached,
    Trained,
)
from kfac_bench.training import checkpoint
from kfac_bench.training.checkpoint import MANIFEST
from kfac_bench.training.trainer import Trainer
from tests.support.distributed import run_ranks
from tests.support.quick import slow
from tests.support.runs import (
    KFAC,
    METHODS,
    RESNET,
    SMALL,
    before_step,
    end,
    kill,
    of_kind,
    steps_of,
    terminate,
    train,
    train_here,
    write_pictures,
)

LONG = ("trainer.max_steps=15", "trainer.log_freq=1", "trainer.eval_freq=6")


BACKGROUND = {"kfac background": (*KFAC, "kfac.background=true")}
CHANGES = {
    "kfac changes": (
        *KFAC,
        "kfac.damping=0.1",
        "kfac.damping_decay_epochs=[0.4,1.2]",
        "kfac.interval_growth_epochs=[1]",
        "kfac.interval_growth=2",
    )
}
"""An epoch has five steps."""


# Steps 3 and 7 are in the middle of an epoch, between decompositions at 0, 4, 8 and 12.
@pytest.mark.parametrize(
    ("method", "step"),
    [
        *(("kfac eigen", 3), ("kfac inverse", 7), ("kfac changes", 7), ("adam", 7)),
        *(("eigen_adam", 3), slow("kfac background", 7)),
    ],
)
def test_an_interrupted_run_ends_with_the_same_weights(tmp_path, method, step):
    options = (*(METHODS | BACKGROUND | CHANGES)[method], *LONG)
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


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path):
    options = (*METHODS["adam"], *LONG, "run_id=r")
    with before_step(3, kill), pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, *options)
    _, path = train(tmp_path, *options)
    assert of_kind(path, Resumed) == []
    assert steps_of(path, Trained)[:4] == [1, 2, 3, 4]
    _, straight = train(tmp_path, *METHODS["adam"], *LONG)
    assert end(path).weights_sha256 == end(straight).weights_sha256


def test_an_unfinished_last_line_does_not_damage_the_record(tmp_path):
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


@pytest.mark.parametrize("end_early", ["trainer.target=18", "trainer.max_train_s=1e-9"])
def test_a_run_killed_after_its_last_evaluation_ends_at_the_same_step(
    tmp_path, monkeypatch, end_early
):
    options = (*METHODS["adam"], "trainer.eval_freq=3", end_early, "run_id=r")
    _, straight = train(tmp_path / "straight", *options)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_predict", kill)
        with pytest.raises(RuntimeError, match="killed"):
            train(tmp_path, *options)
    status, path = train(tmp_path, *options)
    assert status == end(straight).status
    for kind in (Evaluated, TargetReached, RunEnded):
        assert steps_of(path, kind) == steps_of(straight, kind)


def test_an_evaluation_that_another_run_owes_does_not_end_a_new_run_without_checkpoint(tmp_path):
    options = (*METHODS["adam"], "trainer.max_steps=5")
    with before_step(5, terminate):
        _, first = train(tmp_path, *options, "run_id=first")
    more = ("trainer.max_steps=10", "trainer.target=19", f"resume={first}", "run_id=second")
    status, second = train(tmp_path, *options, *more)
    assert (status, end(second).step, checkpoint.find(second)[0].step) == ("reached", 10, 10)


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


def test_resume_uses_the_settings_of_the_new_run(tmp_path):
    adam = ("optimizer=adam", "kfac=none", "trainer.log_freq=1")
    _, first = train(tmp_path, *adam, "trainer.max_steps=5", "run_id=first", "optimizer.lr=0.01")
    more = ("optimizer.lr=0.002", "optimizer.beta1=0.5", "trainer.max_steps=10")
    _, second = train(tmp_path, *adam, *more, "run_id=second", f"resume={first}")
    assert {e.lr for e in of_kind(second, Trained)} == {0.002}
    groups = checkpoint.find(second)[0].shards[0]["optimizer"]["param_groups"]
    assert groups[0]["betas"] == (0.5, 0.999)


@pytest.mark.parametrize(("method", "kfac_steps"), [("kfac eigen", 10), ("adam", None)])
def test_a_new_phase_begins_at_step_0_with_the_whole_state(tmp_path, method, kfac_steps):
    options = (*METHODS[method], "trainer.log_freq=1", "trainer.max_steps=5")
    _, first = train(tmp_path, *options, "run_id=first")
    more = (*options, "new_phase=true", f"resume={first}", "run_id=second")
    with before_step(3, terminate):
        train(tmp_path, *more)
    _, second = train(tmp_path, *more)
    assert steps_of(second, Resumed) == [0, 3], "the second start has a checkpoint of its own"
    assert steps_of(second, Trained) == [1, 2, 3, 4, 5]
    before, after = of_kind(first, Evaluated)[-1], of_kind(second, Evaluated)[0]
    assert (after.step, after.train_s, after.metrics) == (0, 0.0, before.metrics)
    assert of_kind(second, DataChanged) == []
    kfac = checkpoint.find(second)[0].shards[0]["kfac"]
    assert (kfac and kfac["steps"]) == kfac_steps
    _, third = train(tmp_path, *options, f"model.weights={first}", "run_id=third")
    assert of_kind(third, Evaluated)[0].metrics == after.metrics
    assert end(third).weights_sha256 != end(second).weights_sha256, "the weights alone were loaded"


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (["resume=/nowhere/at/all"], "resume=/nowhere/at/all"),
        (["resume={first}", "model.hidden=[9]", "kfac=none"], "another model"),
        (["resume={first}", "model.hidden=[9]"], "K-FAC state"),
        (["resume={first}", "optimizer=adam"], "optimizer"),
        (
            ["resume={first}", "trainer.max_steps=5"],
            "step-00000005 has 5 steps, and this run ends after step 5. Set a larger",
        ),
        (["new_phase=true"], "new_phase=true needs a run to start from: set resume=runs/RUN_ID"),
        (
            ["resume={first}", "new_phase=true", "kfac.damping=1", "kfac.damping_decay_epochs=[1]"],
            "new_phase=true does not fit kfac.damping_decay_epochs",
        ),
    ],
)
def test_a_resume_that_cannot_work_is_refused_in_one_line(tmp_path, overrides, fragment):
    _, first = train(tmp_path, *KFAC, "trainer.max_steps=5", "run_id=first")
    told = [o.format(first=first) for o in overrides]
    with pytest.raises(UsageError) as caught:
        train(tmp_path, *KFAC, "run_id=second", *told)
    assert fragment in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    # The corrected command may use the same run_id.
    assert not (tmp_path / "second").exists()


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


def test_changes_at_epochs_need_the_steps_of_kfac(tmp_path):
    _, first = train(tmp_path, *METHODS["kfac eigen"], "trainer.max_steps=5", "run_id=first")
    _, alone = train(tmp_path, *KFAC, "kfac=none", "trainer.max_steps=5", "run_id=alone")
    more = (*CHANGES["kfac changes"], "trainer.max_steps=10", "run_id=second")
    with pytest.raises(UsageError, match="has 5 steps of training and 0 of K-FAC"):
        train(tmp_path, *more, f"resume={alone}")
    assert train(tmp_path, *more, f"resume={first}")[0] == "finished"


BASE_OF_FILES = (
    *("model=autoencoder", "model.hidden=[12,4]", "data=imagefolder", "data.image_size=4"),
    *("data.workers=0", "logger=none", "trainer.threads=1", "trainer.batch_size=8"),
    *("trainer.checkpoint_freq=4", "trainer.max_steps=10", "kfac=none", "run_id=run"),
    "trainer.predictions=0",
)


@pytest.fixture
def root(tmp_path):
    return write_pictures(tmp_path / "data", train=33, val=6)


def begun(tmp_path, root):
    """Return the run directory of a run that was killed after its checkpoint of step 4."""
    with before_step(7, kill), pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, f"data.root={root}", base=BASE_OF_FILES)
    return tmp_path / "run"


def test_a_missing_image_stops_the_run_unless_it_is_accepted(tmp_path, root, capsys):
    path = begun(tmp_path, root)
    checkpoints = sorted(path.glob("checkpoints/*"))
    (root / "train/class0/04.png").unlink()
    said = r"the data changed since .*step-00000004: train has 32 examples, before 33\. Restore the"
    with pytest.raises(UsageError, match=said):
        train(tmp_path, f"data.root={root}", base=BASE_OF_FILES)
    assert sorted(path.glob("checkpoints/*")) == checkpoints
    accepted = (f"data.root={root}", "data.changed=accept")
    assert train(tmp_path, *accepted, base=BASE_OF_FILES) == ("finished", path)
    (started,) = of_kind(path, RunStarted)
    assert started.data["train"]["examples"] == 33
    (changed,) = of_kind(path, DataChanged)
    assert (changed.step, changed.difference) == (4, "train has 32 examples, before 33")
    assert changed.data["train"]["examples"] == 32
    assert "the data changed since" in capsys.readouterr().out


def test_the_same_data_elsewhere_continue(tmp_path, root):
    path = begun(tmp_path, root)
    moved = shutil.move(root, tmp_path / "moved")
    assert train(tmp_path, f"data.root={moved}", base=BASE_OF_FILES)[0] == "finished"
    assert [e.step for e in of_kind(path, Resumed)] == [4]
    assert of_kind(path, DataChanged) == []
    once = tmp_path / "once"
    train(once, f"data.root={moved}", base=BASE_OF_FILES)
    assert end(path).weights_sha256 == end(once / "run").weights_sha256


def test_a_checkpoint_without_a_fingerprint_continues_with_one_line(tmp_path, root, capsys):
    path = begun(tmp_path, root)
    edit_shard(path / "checkpoints" / "step-00000004", lambda shard: shard.pop("data"))
    (root / "train/class0/04.png").unlink()
    capsys.readouterr()
    assert train(tmp_path, f"data.root={root}", base=BASE_OF_FILES)[0] == "finished"
    said = [x for x in capsys.readouterr().out.splitlines() if "does not say which data" in x]
    assert len(said) == 1
    assert of_kind(path, DataChanged) == []


def edit_shard(checkpoint, edit):
    """Change a checkpoint, with a manifest that fits."""
    shard = torch.load(checkpoint / "rank0.pt", weights_only=True)
    edit(shard)
    torch.save(shard, checkpoint / "rank0.pt")
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    digest = hashlib.sha256((checkpoint / "rank0.pt").read_bytes()).hexdigest()
    manifest["sha256"]["rank0.pt"] = digest
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def test_a_run_of_torch_2_6_continues(tmp_path):
    """Its Adam has no key decoupled_weight_decay."""
    words = ("optimizer=adam", "kfac=none", "trainer.eval_freq=2", "trainer.checkpoint_freq=2")
    _, path = train(tmp_path, *words, "run_id=old", "trainer.max_steps=2")
    edit_shard(
        path / "checkpoints" / "step-00000002",
        lambda shard: [g.pop("decoupled_weight_decay") for g in shard["optimizer"]["param_groups"]],
    )
    assert train(tmp_path, *words, "run_id=old", "trainer.max_steps=4")[0] == "finished"
    assert [e.step for e in of_kind(path, Resumed)] == [2]
    straight = train(tmp_path, *words, "trainer.max_steps=4", "run_id=straight")[1]
    assert end(path).weights_sha256 == end(straight).weights_sha256


def test_another_run_may_start_from_a_checkpoint_of_other_data(tmp_path, root):
    path = begun(tmp_path, root)
    (root / "train/class0/04.png").unlink()
    other = (f"data.root={root}", f"resume={path}", "run_id=other")
    assert train(tmp_path, *other, base=BASE_OF_FILES)[0] == "finished"
    assert [e.step for e in of_kind(tmp_path / "other", DataChanged)] == [4]


@pytest.mark.ranks
def test_all_ranks_stop(tmp_path, root):
    begun(tmp_path, root)
    (root / "train/class0/04.png").unlink()
    saids = run_ranks(2, _refused, str(tmp_path), [f"data.root={root}"])
    assert all("train has 32 examples, before 33" in said for said in saids)


def _refused(folder, options):
    torch.set_num_threads(1)
    with pytest.raises(UsageError) as caught:
        train_here(folder, options, base=BASE_OF_FILES)
    return str(caught.value)
