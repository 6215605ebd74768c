"""Ranks with unequal shares of a batch, or none of it: all is as on one process."""

import pytest
import torch

from kfac_bench.errors import UsageError
from kfac_bench.record.events import Trained
from kfac_bench.training import checkpoint
from tests.support.distributed import run_ranks
from tests.support.quick import quick_if
from tests.support.runs import RESNET, SMALL, end, of_kind, train, train_here

STABLE = (
    "optimizer.lr=0.02",
    "kfac.damping=0.1",
    "kfac.update_freq=2",
    "kfac.factor_update_freq=1",
    "kfac.spread=false",
    "trainer.log_freq=1",
    "trainer.max_steps=9",
)
BATCHES = {
    "odd": ("trainer.batch_size=251",),
    "last": ("trainer.batch_size=448", "trainer.drop_last=false"),  # 3 examples at steps 4, 8
}
KINDS = {
    "eigen": (),
    "ekfac": ("kfac.method=ekfac",),
    "type2": ("kfac.fisher=type2",),
    "inverse, adaptive": (
        "kfac.method=inverse",
        "kfac.adaptive_damping=true",
        "kfac.damping_freq=2",
    ),
    "none": ("kfac=none",),
    "in parts": ("trainer.accumulate=2",),
}


def outcome_of(path):
    """Losses, dampings, weights, and K-FAC's factors by layer, of a run's end."""
    trained, shards = of_kind(path, Trained), checkpoint.find(path)[0].shards
    states = [s["kfac"]["layers"] for s in shards if s["kfac"] is not None]
    factors = {
        (name, f): entries[f]["factor"]
        for state in states
        for name, entries in state.items()
        for f in entries.keys() & set("AG")
    }
    return [e.loss for e in trained], [e.damping for e in trained], shards[0]["model"], factors


QUICK = [(2, "odd", "eigen"), (2, "last", "in parts"), (4, "last", "eigen")]
CASES = [*QUICK[:2], *((4, "last", k) for k in KINDS if k != "in parts")]


@pytest.mark.ranks
@pytest.mark.supports("ddp", "kfac-train")
@pytest.mark.parametrize(("world", "batches", "kind"), quick_if(QUICK.__contains__, CASES))
def test_unequal_shares_give_the_same_result_as_one_process(tmp_path, world, batches, kind):
    options = (*STABLE, *BATCHES[batches], *KINDS[kind])
    _, alone = train(tmp_path, *options, "run_id=alone")
    done = run_ranks(world, train_here, tmp_path, (*options, "run_id=ranks"))
    assert {status for status, _, _ in done} == {"finished"}
    assert len({weights for _, _, weights in done}) == 1, "the ranks' weights differ"
    ours, theirs = outcome_of(tmp_path / "ranks"), outcome_of(alone)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
    assert ours[1] == theirs[1]
    for name, weight in theirs[2].items():
        torch.testing.assert_close(ours[2][name], weight, rtol=1e-3, atol=1e-4)
    assert ours[3].keys() == theirs[3].keys()
    for key, factor in theirs[3].items():
        largest = factor.abs().max().item()
        torch.testing.assert_close(ours[3][key], factor, rtol=1e-2, atol=1e-3 * largest)


def test_a_smaller_last_batch_is_one_update(tmp_path):
    options = (*STABLE, "trainer.max_epochs=2", *BATCHES["last"])
    _, path = train(tmp_path, *options)
    assert end(path).step == 8
    assert [e.epoch for e in of_kind(path, Trained)][3::4] == [1.0, 2.0]


@pytest.mark.ranks
def test_batch_norm_of_one_example_in_the_last_batch_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"two examples.*trainer\.drop_last=true"):
        train(tmp_path, "trainer.batch_size=673", "trainer.drop_last=false", base=RESNET)
    assert train(tmp_path, "trainer.batch_size=673", "trainer.max_steps=1", base=SMALL)
