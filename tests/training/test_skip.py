"""`data.on_error=skip` leaves unreadable files out of training, counts them and reports them."""

import pytest
import torch

from kfac_bench.core.distributed.collective import TorchCollective
from kfac_bench.data.base.files import Faults, Unreadable
from kfac_bench.data.base.order import Shard, epoch_order, eval_indices, train_indices
from kfac_bench.data.images import imagefolder
from kfac_bench.distributed.backends.fsdp2 import FSDP2
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Evaluated, SampleSkipped, Trained
from kfac_bench.record.sinks.console import ConsoleSink
from kfac_bench.record.sinks.view import metrics_of
from tests.support.distributed import run_ranks
from tests.support.runs import CPU, end, of_kind, train, train_here, trainer_of, write_pictures
from tests.training.test_unequal_batches import outcome_of

BATCH, TRAIN, EVAL = 8, 32, 6
BASE = (
    "model=autoencoder",
    "model.hidden=[12,4]",
    "data=imagefolder",
    "data.image_size=4",
    "data.workers=0",
    "logger=none",
    "trainer.threads=1",
    f"trainer.batch_size={BATCH}",
    "trainer.log_freq=1",
    "trainer.eval_freq=1",
    "trainer.checkpoint_freq=100",
    "trainer.max_steps=6",
    "data.on_error=skip",
    "optimizer.lr=0.02",
    "kfac.damping=0.1",
    "kfac.update_freq=2",
    "kfac.factor_update_freq=1",
    "kfac.spread=false",
)


@pytest.fixture
def root(tmp_path):
    write_pictures(tmp_path / "data", "{}.JPEG", train=TRAIN, val=EVAL)
    return tmp_path / "data"


def files(root, split="train"):
    """Return the files of a split in the order of their indices."""
    return sorted((root / split).glob("*/*"))


def in_epoch(step, shard=None):
    """Return the indices of a batch of the first epoch, or of a rank's part of this batch."""
    return list(train_indices(TRAIN, BATCH, 0, 0, 0, shard or Shard()))[step].tolist()


def spoil(root, indices, split="train"):
    paths = [files(root, split)[i] for i in indices]
    for path in paths:
        path.write_bytes(path.read_bytes()[:100])
    return [str(path) for path in paths]


def named(path):
    return [event.path for event in of_kind(path, SampleSkipped)]


def test_the_loss_is_the_mean_over_the_readable_examples(root, tmp_path):
    bad = in_epoch(0)[2:4]
    paths = spoil(root, bad)
    options = (f"data.root={root}", "data.on_error=skip")
    trainer = trainer_of(tmp_path / "by_hand", *options, base=BASE)
    source, rest = imagefolder.load(root, 4, 0, "skip"), []
    whole = next(source.train(BATCH, 0, 0, 0, Shard()))
    assert len(whole[0]) == BATCH - 2
    for i in range(len(whole[0])):
        batch = source.prepare(tuple(part[i : i + 1] for part in whole))
        rest.append(trainer.task.forward(trainer.model, batch)[0].item())
    status, path = train(tmp_path, *options, base=BASE)
    assert status == "finished"
    assert of_kind(path, Trained)[0].loss == pytest.approx(sum(rest) / len(rest), rel=1e-5)
    assert sorted(named(path)) == sorted(paths)
    events = of_kind(path, SampleSkipped)
    assert [(e.step, e.rank, e.count) for e in events] == [(0, 0, 1), (0, 0, 2)]


@pytest.mark.ranks
def test_ranks_leave_out_the_same_examples_as_one_process(root, tmp_path):
    bad = [*in_epoch(1, Shard(1, 2)), in_epoch(2, Shard(0, 2))[0]]  # all of rank 1, one of rank 0
    paths = spoil(root, bad)
    options = (
        *BASE,
        f"data.root={root}",
        "trainer.max_steps=12",
    )  # in later epochs other ranks read the files
    _, alone = train(tmp_path, "run_id=alone", base=options)
    done = run_ranks(2, train_here, tmp_path, ("run_id=ranks",), options)
    assert [status for status, _, _ in done] == ["finished"] * 2
    assert len({weights for _, _, weights in done}) == 1
    ours, theirs = outcome_of(tmp_path / "ranks"), outcome_of(alone)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
    for name, weight in theirs[2].items():
        torch.testing.assert_close(ours[2][name], weight, rtol=1e-4, atol=1e-5)
    for key, factor in theirs[3].items():
        torch.testing.assert_close(ours[3][key], factor, rtol=1e-3, atol=1e-5)
    assert sorted(named(alone)) == sorted(named(tmp_path / "ranks")) == sorted(paths)
    ranks = {e.path: e.rank for e in of_kind(tmp_path / "ranks", SampleSkipped)}
    assert [ranks[path] for path in paths] == [1, 1, 1, 1, 0]
    assert all(f"left out: {path}" in done[0][1].replace("\n", "") for path in paths)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_without_a_readable_example_ends_the_run(root, tmp_path, world):
    paths = spoil(root, in_epoch(2))
    options = (*BASE, f"data.root={root}", "run_id=run")
    if world == 1:
        assert train(tmp_path, base=options)[0] == "failed"
    else:
        done = run_ranks(world, train_here, tmp_path, ("seed=0",), options)
        assert [status for status, _, _ in done] == ["failed"] * world
    assert "no example of batch 3 can be read" in end(tmp_path / "run").message
    assert sorted(named(tmp_path / "run")) == sorted(paths)


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "parts"), [(1, 1), (2, 1), (1, 2)])
def test_one_readable_example_for_batch_norm_ends_the_run(root, tmp_path, world, parts):
    """Cover one process, one of two ranks, and one of two accumulated parts."""
    part = in_epoch(2, Shard(world - 1, world))
    left = 3 if parts == 2 else 1
    spoil(root, part[left:])
    options = (
        *(o for o in BASE if not o.startswith("model")),
        "model=resnet8",
        "run_id=run",
        f"data.root={root}",
        f"trainer.accumulate={parts}",
        "data.image_size=8",
    )
    if world == 1:
        assert train(tmp_path, base=options)[0] == "failed"
    else:
        done = run_ranks(world, train_here, tmp_path, ("seed=0",), options)
        assert [status for status, _, _ in done] == ["failed"] * world
    assert "only one example of a part of batch 3 can be read" in end(tmp_path / "run").message
    assert end(tmp_path / "run").step == 2


@pytest.mark.ranks
def test_evaluation_covers_the_readable_examples(root, tmp_path):
    options = (*BASE, f"data.root={root}", "trainer.max_steps=1")
    part = next(eval_indices(EVAL, 1000, Shard(1, 2))).tolist()
    trainer = trainer_of(tmp_path / "by_hand", base=options)
    images = torch.cat([trainer._to_device(b)[0] for b in trainer.data.evaluate(2, Shard())])
    good = [i for i in range(EVAL) if i not in part]
    error = (trainer.model(images) - images).square().flatten(1).sum(1)[good].mean().item()
    paths = spoil(root, part, "val")  # all of rank 1
    _, alone = train(tmp_path, "run_id=alone", base=options)
    run_ranks(2, train_here, tmp_path, ("run_id=ranks",), options)
    for path in (alone, tmp_path / "ranks"):
        evaluated = of_kind(path, Evaluated)
        assert [e.left_out for e in evaluated] == [len(part)] * 2
        assert evaluated[0].metrics["squared_error"] == pytest.approx(error, rel=1e-5)
        assert sorted(named(path)) == sorted(paths)  # once, although each evaluation reads them
    spoil(root, good, "val")
    status, path = train(tmp_path, "run_id=none", base=options)
    assert status == "failed"
    assert "no example of the evaluation set can be read" in end(path).message


def train_sharded(folder, *options):
    return train(folder, base=options, backend=FSDP2(Ranks(CPU, TorchCollective())))


@pytest.mark.ranks
def test_a_rank_without_examples_keeps_pace_in_lockstep(root, tmp_path):
    """Rank 1 has no readable example, and the first example, its usual stand-in, is unreadable."""
    spoil(root, [*in_epoch(1, Shard(1, 2)), in_epoch(0)[0]])
    part = next(eval_indices(EVAL, 1000, Shard(1, 2))).tolist()
    spoil(root, [0, *part], "val")
    options = (*BASE, f"data.root={root}", "trainer.max_steps=3", "backend=fsdp2")
    _, alone = train(tmp_path, "run_id=alone", base=options)
    done = run_ranks(2, train_sharded, tmp_path, *options, "run_id=ranks")
    assert [status for status, _ in done] == ["finished"] * 2
    errors = [
        [e.metrics["squared_error"] for e in of_kind(path, Evaluated)]
        for path in (alone, tmp_path / "ranks")
    ]
    assert errors[1] == pytest.approx(errors[0], rel=1e-4)
    assert {e.left_out for e in of_kind(tmp_path / "ranks", Evaluated)} == {len(part) + 1}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.slow
def test_a_run_with_left_out_examples_resumes_exactly(root, tmp_path, workers):
    spoil(root, [*in_epoch(0)[:3], *in_epoch(2)[1:3]])
    options = (*BASE, f"data.root={root}", f"data.workers={workers}")
    _, whole = train(tmp_path, "run_id=whole", base=options)
    train(tmp_path, "run_id=parts", "trainer.max_steps=2", base=options)
    _, parts = train(tmp_path, "run_id=rest", f"resume={tmp_path / 'parts'}", base=options)
    assert end(parts).weights_sha256 == end(whole).weights_sha256


def test_without_skip_the_first_bad_file_ends_the_run(root, tmp_path):
    paths = spoil(root, epoch_order(TRAIN, 0, 0)[:BATCH].tolist()[3:4])
    with pytest.raises(UsageError, match=paths[0]):
        train(tmp_path, f"data.root={root}", "data.on_error=fatal", base=BASE)


def test_a_file_is_reported_once_and_each_example_is_counted():
    faults = Faults(skip=True)
    for path in ("a", "b", "a"):
        faults.add(Unreadable(path, "torn"))
    assert [fault.path for fault in faults.take()] == ["a", "b"]
    assert (faults.take(), faults.left_out) == ([], 3)
    faults.add(Unreadable("a", "torn"))
    assert faults.take() == []
    with pytest.raises(UsageError, match="a cannot be read: torn"):
        Faults().add(Unreadable("a", "torn"))


def test_the_console_names_20_files_and_the_dashboard_counts_all(capsys):
    sink = ConsoleSink(metric="accuracy", higher_is_better=True)
    for i in range(1, 31):
        event = SampleSkipped(3, 1.0, f"/data/{i}.JPEG", "torn\x1b[2J", 1, i)
        sink.write(event)
        assert metrics_of(event) == {"step": 3, "train_s": 1.0, "data/skipped_files": i}
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 21
    assert said[19] == "left out: /data/20.JPEG: torn\\x1b[2J (rank 1)"
    assert said[20] == "further files that are left out are in events.jsonl"
    assert metrics_of(Evaluated(1, 1.0, 0.5, {"accuracy": 1.0}, 4))["eval/left_out"] == 4
