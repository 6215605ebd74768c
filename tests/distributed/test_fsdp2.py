"""Runs with backend=fsdp2 train like one process, and write the same checkpoints."""

import json
import warnings

import pytest
import torch

from kfac_bench.core.distributed.collective import TorchCollective
from kfac_bench.core.distributed.dtensor import is_sharded, local
from kfac_bench.core.planning.plan import STRATEGIES
from kfac_bench.distributed.backends.fsdp2 import FSDP2, blocks
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import RunFailedError
from kfac_bench.models.image_networks import cifar_resnet
from kfac_bench.record.events import Evaluated, Resumed, Trained
from kfac_bench.training import checkpoint
from tests.reliability.faults import launch
from tests.support.distributed import run_ranks
from tests.support.quick import quick_if, slow
from tests.support.runs import (
    CPU,
    KFAC,
    RESNET,
    SMALL,
    before_step,
    end,
    evaluated,
    of_kind,
    steps_of,
    terminate,
    train,
    trainer_of,
)

pytestmark = pytest.mark.ranks

STABLE = (
    *(
        *KFAC,
        "optimizer.lr=0.02",
        "kfac.damping=0.1",
        "kfac.kl_clip=0.001",
        "kfac.trust_ratio=null",
    ),
    *("kfac.method=eigen", "kfac.spread=false", "backend=fsdp2"),
)


def here():
    return FSDP2(Ranks(CPU, TorchCollective()))


def train_here(folder, *overrides):
    return train(folder, *overrides, backend=here())


def stop_here(folder, *overrides):
    """Train, and send SIGTERM to rank 1 in step 7."""
    backend = here()
    with before_step(7, terminate if backend.ranks.rank == 1 else lambda _: None):
        return train(folder, *overrides, backend=backend)


def figures(path):
    return [e.metrics["squared_error"] for e in of_kind(path, Evaluated)]


@pytest.mark.supports("fsdp2", "kfac-train")
@pytest.mark.parametrize(
    "strategy",
    quick_if("mem_opt".__eq__, [s for s in STRATEGIES if s not in ("hybrid_opt", "local_factors")]),
)
def test_a_run_equals_one_process(tmp_path, strategy):
    options = (*STABLE, f"kfac={strategy}", "trainer.clip_grad_norm=0.1", "trainer.max_steps=10")
    run_ranks(2, train_here, tmp_path, *options, "run_id=sharded")
    _, alone = train(tmp_path, *options, "run_id=alone")
    assert figures(tmp_path / "sharded") == pytest.approx(figures(alone), rel=1e-4)


@pytest.mark.supports("fsdp2", "resume on another world size")
@pytest.mark.slow
def test_a_run_continues_on_other_ranks_with_another_backend(tmp_path):
    adam = ("optimizer=adam", "optimizer.lr=0.002")
    options = (*STABLE, *adam, "run_id=r")
    run_ranks(2, train_here, tmp_path, *options, "trainer.max_steps=5")
    saved = checkpoint.find(tmp_path / "r")[0]
    assert ["model" in s for s in saved.shards] == [True, False]
    assert not any(is_sharded(t) for t in saved.shards[0]["model"].values())
    train(tmp_path, *options, "trainer.max_steps=10")
    run_ranks(4, train_here, tmp_path, *options, "trainer.max_steps=15")
    _, alone = train(tmp_path, *STABLE, *adam, "run_id=alone", "trainer.max_steps=15")
    assert steps_of(tmp_path / "r", Resumed) == [5, 10]
    assert figures(tmp_path / "r")[-1] == pytest.approx(figures(alone)[-1], rel=1e-4)


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path):
    options = (*STABLE, "trainer.max_steps=10", "trainer.log_freq=1")
    run_ranks(2, train_here, tmp_path, *options, "run_id=straight")
    halted = run_ranks(2, stop_here, tmp_path, *options, "run_id=stopped")
    assert [s for s, _ in halted] == ["interrupted", "interrupted"]
    run_ranks(2, train_here, tmp_path, *options, "run_id=stopped")
    straight, path = tmp_path / "straight", tmp_path / "stopped"
    assert steps_of(path, Resumed) == [7]
    assert end(path).weights_sha256 == end(straight).weights_sha256
    assert [e.loss for e in of_kind(path, Trained)] == [e.loss for e in of_kind(straight, Trained)]


def evaluate_here(folder, saved, examples):
    """Return the validation metrics of saved weights, on every rank."""
    trainer = trainer_of(folder, "trainer.eval_batch_size=100", base=RESNET, backend=here())
    trainer.restore(checkpoint.load(saved))
    if examples is not None:
        trainer.data.eval_size = examples
    return evaluated(trainer)


@pytest.mark.slow
def test_validation_metrics_are_exact(tmp_path):
    """Cover ranks with one batch more than others, and a rank without examples."""
    _, path = train(tmp_path, *KFAC, "trainer.max_steps=21", base=RESNET)
    saved = checkpoint.find(path)[0].path
    want = of_kind(path, Evaluated)[-1].metrics
    for metrics in run_ranks(4, evaluate_here, tmp_path, saved, None):
        assert metrics["accuracy"] == want["accuracy"]
        assert metrics["loss"] == pytest.approx(want["loss"], rel=1e-6)
    for examples in (405, 3):
        first, *others = run_ranks(4, evaluate_here, tmp_path, saved, examples)
        assert all(o == first for o in others)
        assert first["accuracy"] * examples == pytest.approx(round(first["accuracy"] * examples))


def not_finite_here(folder):
    """Make a weight infinite in rank 1's part only: no rank may write a checkpoint."""
    trainer = trainer_of(folder, *STABLE, backend=here())
    if trainer.ranks.rank == 1:
        local(next(trainer.model.parameters())).data.fill_(torch.nan)
    with pytest.raises(RunFailedError, match="a weight is not finite"):
        trainer.save()


def test_an_infinite_weight_on_one_rank_prevents_the_checkpoint(tmp_path):
    run_ranks(2, not_finite_here, tmp_path)


@pytest.mark.supports("fsdp2", "{what}")
@pytest.mark.parametrize(
    ("what", "option"),
    [
        slow("bf16 autocast", "trainer.precision=bf16"),
        slow("fp16 with GradScaler", "trainer.precision=fp16"),
        ("gradient accumulation", "trainer.accumulate=3"),
    ],
)
def test_a_run_with_low_precision_or_accumulation_trains(tmp_path, what, option):
    options = (*STABLE, option, "trainer.max_steps=10")
    run_ranks(2, train_here, tmp_path, *options, "run_id=sharded")
    _, alone = train(tmp_path, *options, "run_id=alone")
    close = 1e-4 if "accumulate" in option else 1e-2
    assert figures(tmp_path / "sharded") == pytest.approx(figures(alone), rel=close)
    assert figures(alone)[-1] < 0.8 * figures(alone)[0]


class Turned(torch.nn.Module):
    """A module whose output is a view, like the output of BERT's heads."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x).transpose(1, 2)


def views_here():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = here().shard(Turned())
        model(torch.ones(2, 5, 4)).square().sum().backward()
        with pytest.raises(UserWarning):  # the warning of PyTorch 2.14
            warnings.warn("FSDP2-wrapped module (FSDPLinear) returned a view tensor", stacklevel=1)
    return local(model.head.weight.grad).abs().sum().item()


def test_a_view_as_output_warns_for_a_block_but_not_for_the_model():
    assert all(gradient > 0 for gradient in run_ranks(2, views_here))


def test_blocks_are_the_members_of_the_outermost_lists():
    model = cifar_resnet(20, 10, 3)
    found = list(blocks(model))
    assert sum(type(b).__name__ == "BasicBlock" for b in found) == 9
    inside = [m for b in found for m in b.modules()]
    assert len(inside) == len(set(inside)), "a block in another"


@pytest.mark.slow
@pytest.mark.supports("fsdp2", "documented command")
def test_the_documented_command_trains(tmp_path):
    """The ranks are forks with torchrun's variables; tests/cli/test_cli.py starts a torchrun."""
    options = [*SMALL, "backend=fsdp2", "trainer.max_steps=5", f"runs_dir={tmp_path}", "run_id=r"]
    ended = launch.by_hand(tmp_path, 2, options, is_slow=False)
    assert ended.codes == [0, 0], ended.errors
    assert json.loads((tmp_path / "r" / "run.json").read_text())["world_size"] == 2
    assert end(tmp_path / "r").step == 5
