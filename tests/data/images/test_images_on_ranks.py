"""Datasets of images on two ranks: the losses of one process with the same batches."""

import pytest

from kfac_bench.record.events import Evaluated, Trained
from tests.data.base.test_tables import cache  # noqa: F401 (a fixture)
from tests.support.distributed import run_ranks
from tests.support.runs import KFAC, of_kind, train, train_here

BASE = (
    *("data.root=demo", "data.image_size=28", "model=vit", "model.width=16", "model.layers=1"),
    *("model.patch=4", "logger=none", "trainer.threads=1", "trainer.batch_size=32"),
    *("trainer.max_steps=6", "trainer.eval_freq=3", "trainer.log_freq=1", "trainer.predictions=0"),
    *(*KFAC, "optimizer.lr=0.02", "kfac.damping=0.1", "kfac.spread=false"),
)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("data", ["parquet", "mnist"])
def test_two_ranks_have_the_losses_of_one_process(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    base = (*BASE, f"data={data}", "data.workers=0")
    _, alone = train(tmp_path, "run_id=alone", base=base)
    run_ranks(2, train_here, tmp_path, ("run_id=ranks",), base)
    for kind, count in ((Trained, 6), (Evaluated, 3)):
        ours, wanted = (of_kind(path, kind) for path in (tmp_path / "ranks", alone))
        losses = [
            [e.loss if kind is Trained else e.metrics["loss"] for e in x] for x in (ours, wanted)
        ]
        assert len(losses[0]) == count
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
