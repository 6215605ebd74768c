"""What the trainer can: batches in parts, precisions, Fishers, dampings; what it records."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from kfac_bench.core import KFAC
from kfac_bench.core.damping import LevenbergMarquardt
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Resumed, Trained, read
from kfac_bench.tasks.image_tasks import Reconstruction
from kfac_bench.training import checkpoint, run, update
from tests.support.distributed import run_ranks
from tests.support.quick import quick_if, slow
from tests.support.runs import (
    METHODS,
    RESNET,
    SMALL,
    before_step,
    config_of,
    end,
    here,
    losses_of,
    of_kind,
    steps_of,
    terminate,
    train,
    train_here,
    trainer_of,
)

STABLE = (
    "optimizer.lr=0.02",
    "kfac.damping=0.1",
    "kfac.update_freq=4",
    "kfac.factor_update_freq=2",
    "kfac.spread=false",
    "trainer.log_freq=1",
)
"""Small differences stay small, and mean the same on any number of ranks."""


def saved_of(path):
    """Rank 0's part of the newest checkpoint: weights, and K-FAC's state by layer."""
    found, _ = checkpoint.find(path)
    return found.shards[0]["model"], found.shards[0]["kfac"]["layers"]


def sides(state):
    """(name, factor) of a K-FAC state."""
    return {
        (name, f): state[name][f]["factor"]
        for name in state
        for f in state[name].keys() & set("AG")
    }


# ---- a batch in parts ----

KINDS = {
    "eigen": (),
    "ekfac": ("kfac.method=ekfac",),
    "type2": ("kfac.fisher=type2",),
    "inverse, adaptive": (
        "kfac.method=inverse",
        "kfac.factored_damping=true",
        "kfac.adaptive_damping=true",
        "kfac.damping_freq=2",
    ),
    "none": ("kfac=none",),
}


@pytest.mark.parametrize(
    "kind", quick_if(("ekfac", "inverse, adaptive", "none").__contains__, KINDS)
)
def test_parts_give_the_same_result_as_one_batch(tmp_path, kind):
    options = (*STABLE, *KINDS[kind], "trainer.max_steps=8")
    _, whole = train(tmp_path, *options, "run_id=whole")
    _, parts = train(tmp_path, *options, "run_id=parts", "trainer.accumulate=3")  # 86, 85, 85
    assert losses_of(parts) == pytest.approx(losses_of(whole), rel=1e-4)
    assert losses_of(whole)[-1] < 0.97 * losses_of(whole)[0]
    ours, theirs = (checkpoint.find(p)[0].shards[0] for p in (parts, whole))
    for name, weight in theirs["model"].items():
        torch.testing.assert_close(ours["model"][name], weight, rtol=1e-3, atol=1e-4)
    if kind == "none":
        return
    for key, factor in sides(theirs["kfac"]["layers"]).items():
        found = sides(ours["kfac"]["layers"])[key]
        torch.testing.assert_close(found, factor, rtol=1e-2, atol=1e-3 * factor.abs().max().item())
    assert ours["kfac"].get("damping") == theirs["kfac"].get("damping")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_parts_have_nearly_equal_sizes(tmp_path, monkeypatch, accumulate):
    sizes, forward = [], Reconstruction.forward
    monkeypatch.setattr(
        Reconstruction,
        "forward",
        lambda self, model, batch: sizes.append(len(batch[1])) or forward(self, model, batch),
    )
    train(tmp_path, *STABLE, "trainer.max_steps=2", f"trainer.accumulate={accumulate}")
    assert sizes == 2 * {1: [256], 3: [85, 85, 86]}[accumulate]


def test_parts_are_weighted_by_their_sizes(tmp_path):
    """Of three examples, the first part has one and the second part two."""
    options = ("kfac=none", "trainer.batch_size=3", "trainer.accumulate=2")
    trainer = trainer_of(tmp_path, *options)
    batch = next(trainer._batches())
    loss = trainer._update.backward(batch)
    whole, _ = trainer.task.forward(trainer._bare, batch)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)


def messages_here(folder, accumulate):
    """On every rank: gradient messages of one update, and the gradients it left."""
    config = config_of(folder, *STABLE, "kfac=none", f"trainer.accumulate={accumulate}")
    trainer = run.build_trainer(config, here(), run.RunDirectory(config))
    sent = []

    def hook(state, bucket):
        sent.append(bucket.buffer().numel())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    trainer.model.register_comm_hook(None, hook)
    loss = trainer._update.backward(next(trainer._batches()))
    grads = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    return sum(sent), float(loss), grads


@pytest.mark.ranks
@pytest.mark.supports("ddp", "gradient accumulation")
def test_ranks_communicate_at_the_last_part_only(tmp_path):
    once, parts = (run_ranks(2, messages_here, tmp_path, n) for n in (1, 4))
    for (count, loss, grads), (ours, our_loss, our_grads) in zip(once, parts, strict=True):
        assert ours == count == len(grads), "each gradient is sent once"
        assert our_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(our_grads, grads, rtol=1e-4, atol=1e-6)
    assert torch.equal(parts[0][2], parts[1][2])


@pytest.mark.ranks
@pytest.mark.supports("ddp", "gradient accumulation")
@pytest.mark.parametrize("kind", [slow("eigen"), "type2", slow("inverse, adaptive")])
def test_parts_on_two_ranks_give_the_same_result_as_one_batch(tmp_path, kind):
    options = (*STABLE, *KINDS[kind], "trainer.max_steps=8")
    _, whole = train(tmp_path, *options, "run_id=whole")
    more = (*options, "run_id=parts", "trainer.accumulate=3")
    done = run_ranks(2, train_here, tmp_path, more)
    assert [status for status, _, _ in done] == ["finished", "finished"]
    assert done[0][2] == done[1][2], "the ranks' weights differ"
    assert losses_of(tmp_path / "parts") == pytest.approx(losses_of(whole), rel=1e-4)
    for name, weight in saved_of(whole)[0].items():
        found = saved_of(tmp_path / "parts")[0][name]
        torch.testing.assert_close(found, weight, rtol=1e-3, atol=1e-4)


def refused_here(folder, *overrides):
    with pytest.raises(UsageError) as caught:
        run.train(config_of(folder, *overrides), here())
    return str(caught.value)


@pytest.mark.ranks
def test_more_parts_than_a_rank_has_examples_are_refused(tmp_path):
    said = run_ranks(2, refused_here, tmp_path, "trainer.batch_size=4", "trainer.accumulate=3")
    assert said[0] == said[1]
    assert "trainer.accumulate=3 is more than the 2 examples of a rank" in said[0]
    assert "trainer.batch_size=4 over 2 ranks" in said[0]


@pytest.mark.ranks
def test_a_rank_without_an_example_is_refused_before_the_run_begins(tmp_path):
    said = run_ranks(2, refused_here, tmp_path, "trainer.batch_size=1")
    assert said[0] == said[1]
    assert "trainer.batch_size=1 leaves some of 2 ranks without an example" in said[0]
    assert not list(tmp_path.rglob("events.jsonl"))


def test_batch_norm_of_one_example_of_a_part_is_refused(tmp_path):
    many = ("trainer.batch_size=8", "trainer.accumulate=5")
    with pytest.raises(UsageError, match=r"two examples per rank.* times trainer\.accumulate"):
        train(tmp_path, *many, base=("logger=none",))
    assert train(tmp_path, *many, "trainer.max_steps=2")[0] == "finished"  # it has none


# ---- precisions ----


def scaler_of(monkeypatch, **settings):
    """Every fp16 run from now on scales its loss by these settings."""
    monkeypatch.setattr(
        update,
        "GradScaler",
        lambda device, enabled: GradScaler(device, enabled=enabled, **settings),
    )


def seen_in(folder, *overrides, base=SMALL):
    """A run of 8 steps; dtypes of the trained and of the evaluated output, and the path."""
    dtypes = {True: set(), False: set()}

    def watch(trainer):
        trainer._bare.register_forward_hook(
            lambda module, x, y: dtypes[module.training].add(y.dtype)
        )

    with before_step(1, watch):
        _, path = train(folder, *STABLE, *overrides, "trainer.max_steps=8", base=base)
    return dtypes[True], dtypes[False], path


@pytest.mark.parametrize(
    ("precision", "base"),
    [("bf16", SMALL), ("fp16", SMALL), slow("bf16", RESNET)],
)
def test_a_lower_precision_trains_nearly_as_well(tmp_path, monkeypatch, precision, base):
    scaler_of(monkeypatch, init_scale=2.0**10)  # the usual 2**16 overflows at first
    _, _, full = seen_in(tmp_path, "run_id=full", base=base)
    trained, evaluated, path = seen_in(
        tmp_path, f"trainer.precision={precision}", "run_id=half", base=base
    )
    assert trained == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert evaluated == {torch.float32}
    assert losses_of(path) != losses_of(full)
    assert losses_of(path) == pytest.approx(losses_of(full), rel=0.03)
    weights, _ = saved_of(path)
    assert {w.dtype for w in weights.values()} <= {torch.float32, torch.int64}
    first = "trainer.max_steps=1"  # later ones are of other weights
    ours, theirs = (
        sides(saved_of(train(tmp_path, *STABLE, first, *o, base=base)[1])[1])
        for o in ((f"trainer.precision={precision}", "run_id=a"), ("run_id=b",))
    )
    assert {factor.dtype for factor in ours.values()} == {torch.float32}
    errors = [(ours[key] - factor).norm() / factor.norm() for key, factor in theirs.items()]
    assert 0 < max(errors) < 0.1
    assert not any(e.failed_decompositions or e.dropped_statistics for e in of_kind(path, Trained))


def train_scaled_here(folder, options):
    """On every rank: train with a scale that does not overflow at first."""
    with pytest.MonkeyPatch.context() as patch:
        scaler_of(patch, init_scale=2.0**10)
        return train_here(folder, options)


@pytest.mark.ranks
@pytest.mark.supports("ddp", "{what}")
@pytest.mark.parametrize(
    ("what", "options"),
    [
        slow("bf16 autocast", ("trainer.precision=bf16", "kfac=comm_opt")),
        ("bf16 autocast", ("trainer.precision=bf16", "kfac=mem_opt", "trainer.accumulate=3")),
        ("fp16 with GradScaler", ("trainer.precision=fp16", "kfac=hybrid_opt")),
        slow("fp16 with GradScaler", ("trainer.precision=fp16", "trainer.accumulate=2")),
    ],
)
def test_a_lower_precision_gives_the_same_result_on_two_ranks(tmp_path, monkeypatch, what, options):
    scaler_of(monkeypatch, init_scale=2.0**10)
    options = (*options, *STABLE, "trainer.max_steps=8")
    _, alone = train(tmp_path, *options, "run_id=alone")
    done = run_ranks(2, train_scaled_here, tmp_path, (*options, "run_id=ranks"))
    ranks = tmp_path / "ranks"
    assert done[0][2] == done[1][2], "the ranks' weights differ"
    assert losses_of(ranks) == pytest.approx(losses_of(alone), rel=2e-3)
    for key, factor in sides(saved_of(alone)[1]).items():
        if key not in sides(saved_of(ranks)[1]):
            continue  # another rank's
        error = (sides(saved_of(ranks)[1])[key] - factor).norm() / factor.norm()
        assert error < 0.02, key
    if what != "bf16 autocast":
        scales = [checkpoint.find(p)[0].shards[0]["scaler"]["scale"] for p in (ranks, alone)]
        assert scales == [2.0**10] * 2, "an update was left out"


@pytest.mark.parametrize("fisher", ["mc", "type2"])
def test_the_fisher_of_the_model_ignores_the_loss_scale(tmp_path, fisher):
    options = (*STABLE, f"kfac.fisher={fisher}", "trainer.max_steps=1")
    _, full = train(tmp_path, *options, "run_id=full")
    _, half = train(tmp_path, *options, "run_id=half", "trainer.precision=fp16")
    for key, factor in sides(saved_of(full)[1]).items():
        error = (sides(saved_of(half)[1])[key] - factor).norm() / factor.norm()
        assert error < 0.05, key


def test_an_update_that_overflows_is_skipped(tmp_path, monkeypatch):
    scaler_of(monkeypatch, init_scale=2.0**40, backoff_factor=2.0**-10)
    options = (*STABLE, "trainer.precision=fp16", "kfac.factor_update_freq=1")
    options += ("kfac.adaptive_damping=true", "kfac.damping_freq=1")
    trainer = trainer_of(tmp_path, *options)
    before = {k: v.clone() for k, v in trainer._bare.state_dict().items()}
    events, forwards = [], []
    trainer.log.emit = events.append
    trainer._bare.register_forward_hook(lambda *_: forwards.append(1))
    for i, batch in zip(range(2), trainer._batches(), strict=False):
        trainer._train_step(batch)
        assert trainer._update.scaler.get_scale() == 2.0 ** (30 - 10 * i)
        assert all(torch.equal(v, before[k]) for k, v in trainer._bare.state_dict().items())
        assert trainer.kfac.damping == 0.1, "a damping learned from an update that was none"
        assert len(forwards) == i + 1, "the loss was computed again after an update that was none"
    trainer._emit_trained()
    assert events[-1].dropped_statistics >= 4
    assert events[-1].failed_decompositions == 0
    batches = trainer._batches()
    while trainer._update.scaler.get_scale() > 2.0**16 and trainer.step < 8:
        trainer._train_step(next(batches))
    trainer._train_step(next(batches))
    after = trainer._bare.state_dict()
    assert not any(torch.equal(after[k], before[k]) for k in after)
    assert all(torch.isfinite(v).all() for v in after.values())
    assert trainer.kfac.damping != 0.1


# ---- the Fisher of the model ----


def test_type2_is_exact_at_the_output(tmp_path):
    """G of the last layer is the likelihood's Fisher: the identity, or that of a softmax."""
    _, path = train(tmp_path, *STABLE, "kfac.fisher=type2", "trainer.max_steps=3")
    state = saved_of(path)[1]
    torch.testing.assert_close(state[list(state)[-1]]["G"]["factor"][0], torch.eye(64))

    smoothed = (*STABLE, "kfac.fisher=type2", "task.label_smoothing=0.2")
    trainer = trainer_of(tmp_path, *smoothed, base=RESNET)
    batch = next(trainer._batches())
    outputs = []
    trainer.model.register_forward_hook(lambda module, x, y: outputs.append(y.detach()))
    trainer._train_step(batch)
    p = outputs[0].softmax(1)
    fisher = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    found = trainer.kfac.state_dict()["layers"]
    torch.testing.assert_close(found[list(found)[-1]]["G"]["factor"][0], fisher.mean(0))


@pytest.mark.parametrize("base", [SMALL, RESNET], ids=["autoencoder", "resnet8"])
def test_mc_estimates_type2(tmp_path, base):
    """At the output, where labels are all that is random; from one batch's labels."""
    found = {}
    for fisher in ("mc", "type2", "empirical"):
        trainer = trainer_of(tmp_path, *STABLE, f"kfac.fisher={fisher}", base=base)
        trainer._train_step(next(trainer._batches()))
        state = trainer.kfac.state_dict()["layers"]
        found[fisher] = state[list(state)[-1]]["G"]["factor"].diagonal(dim1=1, dim2=2).mean().item()
    assert found["mc"] == pytest.approx(found["type2"], rel=0.1)
    assert abs(found["empirical"] / found["type2"] - 1) > 0.02


def labels_here(folder, overrides):
    """On every rank: what its random numbers would be, and those of a second trainer."""
    seeds = []
    for seed in (0, 1):
        trainer_of(folder, f"seed={seed}", *overrides, backend=here())
        seeds.append(torch.rand(3).tolist())
    return seeds


@pytest.mark.ranks
def test_each_rank_draws_labels_of_its_own(tmp_path):
    drawn = run_ranks(2, labels_here, tmp_path, ("kfac.fisher=mc",))
    assert len({tuple(numbers) for rank in drawn for numbers in rank}) == 4
    assert drawn == run_ranks(2, labels_here, tmp_path, ("kfac.fisher=mc",))


# ---- a damping that adapts ----


def test_the_damping_gets_the_loss_before_and_after_an_update(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(
        LevenbergMarquardt, "update", lambda self, actual, predicted: told.append(actual)
    )
    options = (*STABLE, "kfac.adaptive_damping=true", "trainer.batch_size=1347")  # all: one batch
    _, path = train(tmp_path, *options, "kfac.damping_freq=2", "trainer.max_steps=9")
    losses = losses_of(path)
    changes = [losses[i + 1] - losses[i] for i in range(8)]
    assert told == pytest.approx(changes[1::2], rel=1e-3, abs=1e-5)
    assert all(change < 0 for change in told)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_computing_the_loss_again_changes_nothing(tmp_path, monkeypatch, accumulate):
    monkeypatch.setattr(LevenbergMarquardt, "update", lambda self, actual, predicted: None)
    options = (*STABLE, "trainer.max_steps=4", f"trainer.accumulate={accumulate}")
    adaptive = ("kfac.adaptive_damping=true", "kfac.damping_freq=1")
    _, straight = train(tmp_path, *options, "run_id=a", base=RESNET)
    _, looked = train(tmp_path, *options, *adaptive, "run_id=b", base=RESNET)
    assert end(looked).weights_sha256 == end(straight).weights_sha256  # running averages, too


def test_the_damping_changes_and_is_recorded(tmp_path):
    options = (*STABLE, "kfac.adaptive_damping=true", "kfac.damping_freq=2", "trainer.max_steps=6")
    _, path = train(tmp_path, *options)
    seen = [e.damping for e in of_kind(path, Trained)]
    assert seen[0] == 0.1
    changes = [after / before for before, after in zip(seen[1::2], seen[3::2], strict=False)]
    assert {round(c, 6) for c in changes} <= {1.0, round(0.95**2, 6), round(0.95**-2, 6)}
    assert seen[1] != 0.1, "it never changes"
    assert seen[1] == seen[2], "it changes every second step"
    _, constant = train(tmp_path, *STABLE, "trainer.max_steps=3", "run_id=constant")
    assert {e.damping for e in of_kind(constant, Trained)} == {0.1}


# ---- taken up again, with all of it ----

EVERYTHING = (
    *STABLE,
    "kfac.spread=true",
    "kfac.method=ekfac",
    "kfac.fisher=mc",
    "kfac.adaptive_damping=true",
    "kfac.damping_freq=3",
    "trainer.precision=fp16",
    "trainer.accumulate=3",
    "trainer.max_steps=15",
)


@pytest.mark.parametrize(("step", "state"), [slow(3, "fp32"), slow(7, "fp32"), (7, "bf16")])
def test_an_interrupted_run_with_everything_ends_with_the_same_weights(
    tmp_path, monkeypatch, step, state
):
    scaler_of(monkeypatch, init_scale=2.0**21, growth_interval=4)  # it overflows now and then
    options = (*EVERYTHING, f"kfac.state_dtype={state}")
    _, straight = train(tmp_path, *options, "run_id=straight")
    with before_step(step, terminate):
        train(tmp_path, *options, "run_id=stopped")
    _, path = train(tmp_path, *options, "run_id=stopped")
    assert steps_of(path, Resumed) == [step]
    assert losses_of(path) == losses_of(straight)
    assert end(path).weights_sha256 == end(straight).weights_sha256
    dampings = [e.damping for e in of_kind(path, Trained)]
    assert dampings == [e.damping for e in of_kind(straight, Trained)]
    assert len(set(dampings)) > 2
    scales = [checkpoint.find(p)[0].shards[0]["scaler"]["scale"] for p in (path, straight)]
    assert scales[0] == scales[1]


@pytest.mark.slow
@pytest.mark.ranks
def test_an_interrupted_run_with_everything_on_two_ranks(tmp_path):
    run_ranks(2, train_here, tmp_path, (*EVERYTHING, "run_id=straight"))
    run_ranks(2, train_here, tmp_path, (*EVERYTHING, "run_id=stopped"), SMALL, (1, 7))
    done = run_ranks(2, train_here, tmp_path, (*EVERYTHING, "run_id=stopped"))
    straight, path = tmp_path / "straight", tmp_path / "stopped"
    assert steps_of(path, Resumed) == [7]
    assert losses_of(path) == losses_of(straight)
    assert end(path).weights_sha256 == end(straight).weights_sha256
    assert done[0][2] == done[1][2], "the ranks' weights differ"


@pytest.mark.parametrize("to", ["fp16", "fp32"])
def test_resume_in_another_precision(tmp_path, to):
    first = "fp32" if to == "fp16" else "fp16"
    options = (*STABLE, f"trainer.precision={first}", "run_id=first", "trainer.max_steps=4")
    _, path = train(tmp_path, *options)
    more = (f"trainer.precision={to}", "run_id=second", f"resume={path}", "trainer.max_steps=8")
    status, second = train(tmp_path, *STABLE, *more)
    assert (status, end(second).step) == ("finished", 8)


# ---- what is recorded ----


def test_without_kfac_events_have_no_kfac_metrics(tmp_path):
    _, path = train(tmp_path, *METHODS["adam"], "trainer.max_steps=2", "trainer.log_freq=1")
    for event in of_kind(path, Trained):
        found = (event.damping, event.failed_decompositions, event.dropped_statistics)
        assert found == (None, None, None)


def counted_here(folder):
    """On every rank: what rank 0 records when each rank counts its own."""
    trainer = trainer_of(folder, *STABLE, backend=here())
    trainer.kfac._executor.solver.failed = 1 + trainer.ranks.rank
    statistics = trainer.kfac._executor.batch_statistics
    statistics._lost += 10 * (1 + trainer.ranks.rank) * [torch.ones((), dtype=torch.bool)]
    first, *others = trainer.kfac.layer_names
    known = {first: 3.0} if trainer.ranks.rank == 0 else {first: 3.0, others[0]: 7.0}
    trainer.kfac.conditions = lambda: known
    found = trainer._meter.kfac_statistics()
    assert found["condition"] == {first: 3.0, others[0]: 7.0}  # other layers have none
    return found["failed_decompositions"], found["dropped_statistics"]


@pytest.mark.ranks
def test_the_counts_are_those_of_all_ranks(tmp_path):
    assert run_ranks(2, counted_here, tmp_path) == [(3, 30), (3, 30)]


def test_counts_are_read_only_when_they_are_recorded(tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(
        KFAC,
        "dropped_statistics",
        property(lambda self: reads.append(self.steps) or 0),
    )
    train(tmp_path, *STABLE, "trainer.max_steps=7", "trainer.log_freq=3")
    assert reads == [3, 6, 7]


def test_old_event_files_are_read(tmp_path):
    old = {"event": "Trained", "step": 3, "train_s": 1.0, "epoch": 0.5, "loss": 2.0, "lr": 0.1}
    old |= {"examples_per_s": 9.0, "nu": 0.5, "cosine": {"a": 1.0}, "stage_s": {}}
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(old) + "\n")
    [event] = read(path)
    assert (event.loss, event.nu, event.damping, event.dropped_statistics) == (2.0, 0.5, None, None)


def test_damping_and_intervals_change_at_their_epochs(tmp_path):
    changes = ("kfac.damping_decay_epochs=[1,2]", "kfac.interval_growth_epochs=[2]")
    trainer = trainer_of(tmp_path, *STABLE, *changes, "kfac.interval_growth=3")
    kfac, per_epoch, seen = trainer.kfac, trainer.length.steps_per_epoch, []
    for step in (0, per_epoch - 1, per_epoch, 2 * per_epoch):
        kfac.steps = step
        seen.append((kfac.damping, kfac.update_freq))
    assert seen == [(0.1, 4), (0.1, 4), (0.05, 4), (0.025, 12)]


def test_the_console_says_what_changes(tmp_path, capsys):
    train(tmp_path, *STABLE, "kfac.damping_decay_epochs=[40,80]", "trainer.max_steps=1")
    said = "damping 0.1, times 0.5 after each of the epochs 40, 80"
    assert said in " ".join(capsys.readouterr().out.split())
