"""A run continues on other ranks, strategies and backends, and computes the same."""

import pytest
import torch

from kfac_bench.record.events import Resumed, Trained
from kfac_bench.training import checkpoint
from tests.support.distributed import run_ranks
from tests.support.quick import slow
from tests.support.runs import KFAC, SMALL, steps_of, train, train_here
from tests.support.training import assert_close

STABLE = (
    *(*KFAC, "optimizer.lr=0.02", "kfac.damping=0.1", "kfac.spread=false", "trainer.log_freq=1"),
    *("trainer.checkpoint_freq=1", "trainer.keep_last=100", "run_id=r"),
)
"""Decompositions at steps 0, 4, 8, ... and a checkpoint of each step."""
OF_EIGEN_ADAM = (
    *("optimizer=eigen_adam", "optimizer.lr=0.01", "optimizer.eps=0.1", "optimizer.scale=0.5"),
    *("optimizer.orthogonal_scale=0.5", "kfac.update_freq=4", "kfac.factor_update_freq=2"),
    *("kfac.spread=false", *STABLE[STABLE.index("trainer.log_freq=1") :]),
)
"""The same; a large eps and small scales keep rounding errors small, as in training.py."""


def alone(world_size, folder, overrides):
    """Train on one process."""
    train(folder, *overrides)


def ddp(world_size, folder, overrides):
    """Train on ranks of a pool."""
    run_ranks(world_size, train_here, folder, overrides)


LAUNCHERS = {"alone": alone, "ddp": ddp}
"""How each backend trains on a number of ranks; a new backend is one line here."""


def updates_of(path):
    """Return the change of the weights in each step of a run, by step."""
    steps = sorted((path / "checkpoints").iterdir())
    models = [checkpoint.load(p).shards[0]["model"] for p in steps]
    return {
        int(p.name.removeprefix("step-")): [now[k] - before[k] for k in now]
        for p, before, now in zip(steps[1:], models, models[1:], strict=False)
    }


CHAIN = (
    *(("ddp", 2, "comm_opt"), ("alone", 1, "comm_opt"), ("ddp", 2, "mem_opt")),
    *(("ddp", 4, "hybrid_opt"), ("ddp", 2, "layer_wise"), ("alone", 1, "mem_opt")),
)


@pytest.mark.ranks
@pytest.mark.supports("ddp", "resume on another world size")
@pytest.mark.parametrize("method", ["eigen", slow("inverse"), slow("eigen_adam")])
def test_a_run_goes_on_with_other_ranks_and_another_strategy(tmp_path, method):
    options = (*STABLE, f"kfac.method={method}")
    if method == "eigen_adam":
        options = OF_EIGEN_ADAM
    for link, (backend, world_size, strategy) in enumerate(CHAIN, start=1):
        more = (f"trainer.max_steps={3 * link}", f"kfac.strategy={strategy}")
        LAUNCHERS[backend](world_size, tmp_path, (*options, *more))
        [newest] = tmp_path.glob(f"r/checkpoints/step-{3 * link:08d}")
        assert len(list(newest.glob("rank*.pt"))) == world_size
    last = 3 * len(CHAIN)
    _, straight = train(tmp_path / "alone", *options, f"trainer.max_steps={last}")
    path = tmp_path / "r"
    assert steps_of(path, Resumed) == list(range(3, last, 3))
    assert steps_of(path, Trained) == list(range(1, last + 1))
    ours, theirs = updates_of(path), updates_of(straight)
    assert ours.keys() == theirs.keys() == set(range(2, last + 1))
    for step, update in theirs.items():
        assert_close(ours[step], update, 1e-2 if method == "eigen_adam" else 2e-3)


@pytest.mark.ranks
def test_another_method_decomposes_again_on_any_number_of_ranks(tmp_path):
    options = (*STABLE, "trainer.max_steps=6")
    train(tmp_path, *options)
    update = {}
    for name, launch, world_size in (("alone", alone, 1), ("ranks", ddp, 2)):
        more = (f"run_id={name}", f"resume={tmp_path}/r", "trainer.max_steps=8")
        launch(world_size, tmp_path, (*options, *more, "kfac.method=eigen"))
        update[name] = updates_of(tmp_path / name)[8]
    assert_close(update["ranks"], update["alone"], 1e-3)
    train(tmp_path, *options, "trainer.max_steps=8")
    same = updates_of(tmp_path / "r")[8]
    assert any(
        not torch.allclose(a, b, rtol=0.1) for a, b in zip(same, update["alone"], strict=True)
    )


def tensor_bytes(tree):
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return sum(map(tensor_bytes, values))


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["comm_opt", slow("hybrid_opt")])
def test_the_state_of_each_layer_is_saved_once(tmp_path, strategy):
    options = (*STABLE, f"kfac.strategy={strategy}", "model.hidden=[256,64]", "trainer.max_steps=2")
    train(tmp_path / "alone", *options, base=SMALL)
    run_ranks(4, train_here, tmp_path / "ranks", options)
    kfac, files = {}, {}
    for name in ("alone", "ranks"):
        path = tmp_path / name / "r" / "checkpoints" / "step-00000002"
        kfac[name] = [tensor_bytes(s["kfac"]["layers"]) for s in checkpoint.load(path).shards]
        files[name] = sum(p.stat().st_size for p in path.glob("rank*.pt"))
    assert sum(kfac["ranks"]) == kfac["alone"][0]
    assert all(kfac["ranks"]), "one rank saves it all"
    assert files["ranks"] < 1.03 * files["alone"]
