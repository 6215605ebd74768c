"""Average of weights, checkpointed activations, compile, synchronized batch norm and mixup."""

import functools

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import UsageError
from kfac_bench.record import checkpoint_folder
from kfac_bench.record.events import Evaluated, Resumed
from kfac_bench.training import checkpoint, model_changes, weights
from kfac_bench.training.update import has_batch_norm
from tests.support.distributed import run_ranks
from tests.support.runs import (
    RESNET,
    SMALL,
    before_step,
    end,
    losses_of,
    of_kind,
    steps_of,
    terminate,
    train,
    train_here,
    trainer_of,
)
from tests.training.test_trainer import STABLE, saved_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not"  # dynamo's
)
OFTEN = (
    *("optimizer.lr=0.02", "kfac.damping=0.1", "kfac.update_freq=2"),
    *("kfac.factor_update_freq=2", "trainer.log_freq=1", "trainer.predictions=0"),
)
ALL = (
    *("trainer.ema=0.8", "trainer.checkpoint_activations=true", "data.mixup=0.4"),
    *("trainer.clip_grad_norm=0.5", "trainer.max_steps=4"),
)


def average_of(path):
    """The average of the newest checkpoint, by name of the weight."""
    found, _ = checkpoint.find(path)
    return found.shards[0]["ema"]["model"]


# ---- the average of the weights ----


def test_the_average_equals_that_of_a_plain_loop_and_is_evaluated(tmp_path):
    options = (*OFTEN, "trainer.max_steps=3", "trainer.checkpoint_freq=1", "trainer.keep_last=9")
    _, plain = train(tmp_path, *options, "run_id=plain", base=RESNET)
    _, path = train(tmp_path, *options, "trainer.ema=0.8", "run_id=ema", base=RESNET)
    assert losses_of(path) == losses_of(plain), "the average changes the training"
    average = {}
    for step in (1, 2, 3):
        saved = checkpoint.load(checkpoint_folder.path_of(plain / "checkpoints", step)).weights()
        for name, weight in saved.items():
            if not average.get(name, weight).is_floating_point() or step == 1:
                average[name] = weight
            else:
                average[name] = torch.lerp(average[name], weight, 1 - 0.8)
    for name, weight in average_of(path).items():
        assert torch.equal(weight, average[name]), name
    own = trainer_of(tmp_path, *options, base=RESNET)
    own.model.load_state_dict(average)
    own.model.eval()
    evaluation = own.task.evaluation()
    with torch.no_grad():
        for batch, _ in own._rank_batches.evaluate(own.stop):
            evaluation.add(own.model, own._to_device(batch))
    assert of_kind(path, Evaluated)[-1].metrics == evaluation.metrics(own.ranks)
    assert end(path).weights_sha256 != end(plain).weights_sha256


def test_weights_and_exports_of_a_run_with_an_average_are_the_average(tmp_path):
    _, path = train(tmp_path, *OFTEN, "trainer.max_steps=2", "trainer.ema=0.8")
    weights.export(path)
    options = ("trainer.max_steps=1", f"model.weights={path}", "run_id=second")
    trainer = trainer_of(tmp_path, *options)
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, average_of(path)[name])
        assert not torch.equal(weight, saved_of(path)[0][name])


def test_a_run_with_an_average_may_start_from_a_run_without(tmp_path):
    _, path = train(tmp_path, *OFTEN, "trainer.max_steps=2")
    more = ("trainer.max_steps=3", "trainer.ema=0.8", f"resume={path}", "run_id=second")
    _, second = train(tmp_path, *OFTEN, *more)
    assert of_kind(second, Evaluated)[0].metrics != of_kind(path, Evaluated)[0].metrics
    for name, weight in saved_of(second)[0].items():  # the first update is a copy
        assert torch.equal(average_of(second)[name], weight)


def test_integers_are_copied_into_the_average():
    model = nn.BatchNorm1d(3)
    model.register_buffer("positions", torch.arange(1000))
    average = model_changes.average_of(model, 0.999)
    for _ in range(5):
        model(torch.randn(8, 3))
        average.update_parameters(model)
    assert torch.equal(average.module.positions, torch.arange(1000))
    assert average.module.num_batches_tracked == 5


# ---- all options of a run together ----


def test_an_interrupted_run_with_all_options_ends_with_the_same_weights(tmp_path):
    _, straight = train(tmp_path, *OFTEN, *ALL, "run_id=straight", base=RESNET)
    with before_step(3, terminate):
        train(tmp_path, *OFTEN, *ALL, "run_id=stopped", base=RESNET)
    _, path = train(tmp_path, *OFTEN, *ALL, "run_id=stopped", base=RESNET)
    assert steps_of(path, Resumed) == [3]
    assert losses_of(path) == losses_of(straight)
    assert end(path).weights_sha256 == end(straight).weights_sha256
    for name, weight in saved_of(straight)[0].items():
        assert torch.equal(saved_of(path)[0][name], weight), name


@pytest.mark.ranks
@pytest.mark.supports("ddp", "kfac-train")
def test_all_options_on_two_ranks_leave_equal_weights_and_resume(tmp_path):
    run_ranks(2, train_here, tmp_path, (*OFTEN, *ALL, "run_id=straight"), RESNET)
    run_ranks(2, train_here, tmp_path, (*OFTEN, *ALL, "run_id=stopped"), RESNET, (0, 2))
    done = run_ranks(2, train_here, tmp_path, (*OFTEN, *ALL, "run_id=stopped"), RESNET)
    straight, path = tmp_path / "straight", tmp_path / "stopped"
    assert done[0][2] == done[1][2], "the ranks' weights differ"
    assert steps_of(path, Resumed) == [2]
    assert end(path).weights_sha256 == end(straight).weights_sha256


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.supports("ddp", "kfac-train")
def test_the_average_on_two_ranks_equals_that_of_one_rank(tmp_path):
    options = (*STABLE, "trainer.ema=0.8", "trainer.max_steps=4")
    _, alone = train(tmp_path, *options, "run_id=alone")
    run_ranks(2, train_here, tmp_path, (*options, "run_id=ranks"), SMALL)
    for name, weight in average_of(alone).items():
        torch.testing.assert_close(
            average_of(tmp_path / "ranks")[name], weight, rtol=1e-3, atol=1e-4
        )


# ---- checkpointed activations ----


def test_checkpointed_activations_change_no_bit(tmp_path):
    """Neither weights nor the running averages of batch norm, nor the statistics of K-FAC."""
    options = (*OFTEN, "trainer.max_steps=3", "kfac.fisher=mc")
    _, plain = train(tmp_path, *options, "run_id=plain", base=RESNET)
    more = ("trainer.checkpoint_activations=true", "run_id=again")
    _, path = train(tmp_path, *options, *more, base=RESNET)
    assert end(path).weights_sha256 == end(plain).weights_sha256
    (_, ours), (_, theirs) = saved_of(path), saved_of(plain)
    for name, layer in theirs.items():
        for side in layer.keys() & set("AG"):
            assert torch.equal(ours[name][side]["factor"], layer[side]["factor"]), (name, side)


def test_checkpointed_blocks_keep_fewer_activations():
    def kept(model):
        numel = 0

        def pack(x):
            nonlocal numel
            numel += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(torch.randn(64, 8))
        return numel

    layers = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
    model = nn.Sequential(*layers)
    before = kept(model)
    model_changes.checkpoint_blocks(model, "mine")
    assert kept(model) < before / 2


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UsageError, match="model=mine, which has no list of blocks"):
        model_changes.checkpoint_blocks(nn.Sequential(nn.Linear(2, 2)), "mine")


# ---- compile ----


@pytest.fixture
def backend_is(monkeypatch):
    """Compile by another backend: the usual one takes minutes on a CPU."""

    def use(backend):
        monkeypatch.setattr(
            nn.Module,
            "compile",
            functools.partialmethod(nn.Module.compile, backend=backend),
        )

    torch._dynamo.reset()
    yield use
    torch._dynamo.reset()


def test_a_compiled_run_equals_a_plain_run(tmp_path, backend_is):
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    backend_is(graphs)
    options = (*OFTEN, "trainer.max_steps=4", "trainer.ema=0.8")
    _, plain = train(tmp_path, *options, "run_id=plain")
    assert not graphs.frame_count
    _, path = train(tmp_path, *options, "trainer.compile=true", "run_id=compiled")
    assert graphs.frame_count == 3, "the training step, and two sizes of evaluation batches"
    assert losses_of(path) == pytest.approx(losses_of(plain), rel=1e-5)
    for name, weight in saved_of(plain)[0].items():
        torch.testing.assert_close(saved_of(path)[0][name], weight)


@pytest.mark.slow
def test_an_interrupted_compiled_run_ends_with_the_same_weights(tmp_path, backend_is):
    backend_is("aot_eager")
    options = (*OFTEN, "trainer.ema=0.8", "trainer.max_steps=4", "trainer.compile=true")
    _, straight = train(tmp_path, *options, "run_id=straight")
    torch._dynamo.reset()  # as in a new process
    with before_step(3, terminate):
        train(tmp_path, *options, "run_id=stopped")
    torch._dynamo.reset()
    _, path = train(tmp_path, *options, "run_id=stopped")
    assert losses_of(path) == losses_of(straight)
    assert end(path).weights_sha256 == end(straight).weights_sha256


def test_a_model_that_cannot_be_compiled_is_refused_in_one_line(tmp_path, backend_is):
    def broken(graph, inputs):
        raise RuntimeError("no working C++ compiler\nmore lines")

    backend_is(broken)
    with pytest.raises(UsageError) as caught:
        train(tmp_path, *OFTEN, "trainer.compile=true", "run_id=r")
    said = "cannot compile the model here (no working C++ compiler). Set trainer.compile=false"
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "r").exists()


# ---- batch norm of all ranks ----


def test_batch_norm_is_synchronized_on_gpus_only(tmp_path):
    with pytest.raises(UsageError, match="does not fit the device cpu: torch's SyncBatchNorm"):
        train(tmp_path, "trainer.sync_batch_norm=true", base=RESNET)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    names = model.state_dict().keys()
    changed = model_changes.synchronize_batch_norm(model, Ranks(torch.device("cuda")))
    assert type(changed[1]) is nn.SyncBatchNorm
    assert changed.state_dict().keys() == names
    assert not has_batch_norm(changed), "one example of each rank is enough"
    assert has_batch_norm(nn.Sequential(nn.BatchNorm1d(3)))
