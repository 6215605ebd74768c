"""DeepSpeed with ZeRO 0 to 2 on real ranks trains like one process and like DDP."""

import contextlib
import functools
import importlib.util
import os
import runpy

import pytest
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from kfac_bench.config import compose
from kfac_bench.core.distributed.collective import TorchCollective
from kfac_bench.core.distributed.deepspeed_zero import whole_gradients
from kfac_bench.core.planning.plan import STRATEGIES
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Evaluated, Resumed
from kfac_bench.training import checkpoint, run
from tests.reliability.faults import launch
from tests.support import ROOT
from tests.support.distributed import close_pools, run_ranks
from tests.support.quick import quick_if, slow
from tests.support.runs import CPU, SMALL, config_of, here, losses_of, of_kind, steps_of, train
from tests.support.training import (
    STEPS,
    after_step,
    assert_close,
    batch,
    expected,
    loss_of,
    make_kfac,
    my_part,
    one_process,
    optimizer_of,
    sgd,
    sha256,
    tiny_model,
    update,
    weights_of,
)

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

pytestmark = pytest.mark.ranks
STAGES = [slow(0), slow(1), 2]


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_our_own():
    """Give later tests new ranks: DeepSpeed changes torch for good (functional.linear)."""
    yield
    close_pools()


@contextlib.contextmanager
def deepspeed_here(stage):
    """Return this rank's backend, as `join` makes it."""
    from kfac_bench.distributed.backends import deepspeed

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    deepspeed.prepare(CPU)
    backend = deepspeed.DeepSpeed(Ranks(CPU, TorchCollective()), stage)
    try:
        yield backend
    finally:
        backend.close()


# ---- one update ----


def equal_on_rank(stage, strategy, options, parts):
    """Compare with one process, and return the hash of all bits."""
    with deepspeed_here(stage) as backend:
        model = tiny_model()
        optimizer = optimizer_of(model, options)
        kfac = make_kfac(
            model, optimizer, options, strategy=strategy, collective=backend.collective()
        )
        model, optimizer = backend.wrap(model, optimizer)
        bits = []
        for step, (grads, weights, after) in enumerate(
            expected(tiny_model, batch, strategy, options)
        ):
            got = update(backend, model, optimizer, kfac, *my_part(*batch(step)), parts=parts)
            assert_close(got, grads)
            assert_close(weights_of(model), weights)
            assert after_step(kfac) == pytest.approx(after, rel=1e-3)
            bits.append(sha256(got) + sha256(weights_of(model)))
        return bits


def start_on_rank():
    with deepspeed_here(0):
        pass


def check_equal(world, *args):
    run_ranks(
        world, start_on_rank
    )  # a call of its own, because imports take long on a busy machine
    results = run_ranks(world, equal_on_rank, *args)
    assert all(bits == results[0] for bits in results), "ranks differ"
    assert len(results[0]) == STEPS


@pytest.mark.supports("deepspeed zero {stage}", "{strategy}")
@pytest.mark.parametrize(
    ("strategy", "method"),
    quick_if(
        ("comm_opt", "eigen").__eq__, [*((s, "eigen") for s in STRATEGIES), ("comm_opt", "inverse")]
    ),
)
@pytest.mark.parametrize("stage", STAGES)
def test_training_equals_one_process(stage, strategy, method):
    options = {"method": method, "spread": False}
    check_equal(4 if strategy == "hybrid_opt" else 2, stage, strategy, options, 1)


@pytest.mark.slow
def test_eigen_adam_without_zero_equals_one_process():
    """Other stages are refused: tests/training/test_optimizers.py."""
    check_equal(2, 0, "mem_opt", {"method": "eigen_adam", "spread": False}, 1)


@pytest.mark.supports("deepspeed zero {stage}", "gradient accumulation")
@pytest.mark.parametrize("stage", [slow(0), slow(1), 2])
def test_a_batch_in_parts_equals_one_process(stage):
    check_equal(2, stage, "comm_opt", {"spread": False}, 4)
    check_equal(2, stage, "mem_opt", {"spread": False, "fisher": "type2"}, 2)


# ---- runs ----

TRAINED = (
    "model=autoencoder",
    "model.hidden=[16,6]",
    "logger=none",
    "trainer.threads=1",
    "kfac.damping=0.1",
    "kfac.update_freq=4",
    "kfac.factor_update_freq=2",
    "kfac.spread=false",
    "optimizer.lr=0.02",
    "trainer.log_freq=1",
    "trainer.checkpoint_freq=5",
)
"""Options with which small differences stay small."""


def run_here(folder, options, stage):
    """Train on every rank. With `stage=None` the backend is DDP."""
    config = config_of(folder, *options, base=TRAINED)
    with contextlib.nullcontext(here()) if stage is None else deepspeed_here(stage) as backend:
        return run.train(config, backend)[0]


def ran(folder, name, *options, stage):
    """Train on two ranks, and return the run directory."""
    assert run_ranks(2, run_here, folder, (*options, f"run_id={name}"), stage) == ["finished"] * 2
    return folder / name


@pytest.fixture(scope="module")
def with_ddp(tmp_path_factory):
    """Return the directory of a run with DDP, which is made once."""
    folder = tmp_path_factory.mktemp("ddp")

    @functools.cache
    def directory(*options):
        return ran(folder, f"run{len([*folder.iterdir()])}", *options, stage=None)

    return directory


def state_of(path):
    """Return weights and optimizer state of the newest checkpoint."""
    saved = checkpoint.find(path)[0].shards[0]
    return saved["model"], saved["optimizer"]


def assert_same_state(ours, theirs, tolerance=1e-3):
    assert_close(ours[0].values(), theirs[0].values(), tolerance)
    assert [*ours[0]] == [*theirs[0]]
    assert ours[1]["param_groups"] == theirs[1]["param_groups"]
    assert [*ours[1]["state"]] == [*theirs[1]["state"]]
    for number, state in theirs[1]["state"].items():
        assert [*ours[1]["state"][number]] == [*state]
        assert_close(ours[1]["state"][number].values(), state.values(), tolerance)


@pytest.mark.slow
@pytest.mark.supports("deepspeed zero {stage}", "kfac-train")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "options",
    [
        ("optimizer.weight_decay=0.01", "kfac.adaptive_damping=true", "kfac.damping_freq=2"),
        ("optimizer=adamw", "optimizer.lr=0.002", "trainer.accumulate=3", "kfac.fisher=type2"),
        ("kfac=none", "trainer.clip_grad_norm=0.1"),
    ],
    ids=["sgd adaptive", "adamw type2 parts", "none clip"],
)
def test_a_run_equals_one_with_ddp(tmp_path, with_ddp, stage, options):
    options = (*options, "trainer.max_steps=6")
    ours = ran(tmp_path, "ours", *options, stage=stage)
    theirs = with_ddp(*options)
    assert losses_of(ours) == pytest.approx(losses_of(theirs), rel=1e-4)
    assert losses_of(theirs)[-1] < losses_of(theirs)[0]
    assert_same_state(state_of(ours), state_of(theirs))


@pytest.mark.supports("deepspeed zero {stage}", "bf16 autocast")
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_in_bf16_is_close_to_ddp(tmp_path, with_ddp, stage):
    options = ("trainer.precision=bf16", "trainer.accumulate=2", "trainer.max_steps=6")
    ours = ran(tmp_path, "ours", *options, stage=stage)
    theirs, plain = with_ddp(*options), with_ddp(*options[1:])
    assert losses_of(ours) == pytest.approx(losses_of(theirs), rel=1e-4)
    assert losses_of(plain) != pytest.approx(losses_of(theirs), rel=1e-4), "no autocast"


def overflow_on_rank(stage):
    """Return the weights after each update with a loss scale that starts too high."""
    with contextlib.nullcontext(here()) if stage is None else deepspeed_here(stage) as backend:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        kfac = make_kfac(model, optimizer, {"spread": False}, collective=TorchCollective())
        model, optimizer = backend.wrap(model, optimizer)
        scaler, made = GradScaler("cpu", init_scale=2.0**24), []
        for step in range(8):
            before = weights_of(model)
            optimizer.zero_grad()
            x, y = my_part(*batch(step))
            for i in range(2):
                with backend.part(model, last=i == 1):
                    with torch.autocast("cpu", torch.float16):
                        _, loss = loss_of(model, x[i::2], y[i::2])
                    backend.backward(scaler.scale(loss.float() / 2))
            backend.synchronize(optimizer)
            scaler.unscale_(optimizer)
            kfac.step(scaler.get_scale)
            backend.step(optimizer, scaler)
            scaler.update()
            made.append(not torch.equal(before[0], next(model.parameters())))
        return made, weights_of(model)


@pytest.mark.supports("deepspeed zero {stage}", "fp16 with GradScaler")
@pytest.mark.parametrize("stage", STAGES)
def test_fp16_skips_updates_that_overflow(stage):
    [(made, ours), (_, twin)] = run_ranks(2, overflow_on_rank, stage)
    wanted, theirs = run_ranks(2, overflow_on_rank, None)[0]
    assert made == wanted
    assert {*made} == {True, False}
    assert_close(ours, theirs, 1e-3)
    assert sha256(ours) == sha256(twin)


@pytest.mark.slow
@pytest.mark.supports("deepspeed zero {stage}", "resume on another world size")
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_continues_with_another_backend_and_back(tmp_path, stage):
    options = ("optimizer=adam", "optimizer.lr=0.002")
    path = ran(tmp_path, "r", *options, "trainer.max_steps=5", stage=stage)
    train(tmp_path, *options, "run_id=r", "trainer.max_steps=10", base=TRAINED)
    ran(tmp_path, "r", *options, "trainer.max_steps=15", stage=stage)
    _, alone = train(tmp_path, *options, "run_id=alone", "trainer.max_steps=15", base=TRAINED)
    assert steps_of(path, Resumed) == [5, 10]
    assert losses_of(path) == pytest.approx(losses_of(alone), rel=1e-3)
    assert_same_state(state_of(path), state_of(alone), 1e-2)


def test_a_schedule_works_with_groups_that_count_steps(tmp_path):
    options = ("optimizer=muon", "schedule=cosine", "kfac=none", "trainer.max_epochs=3")
    path = ran(tmp_path, "r", *options, "trainer.max_steps=6", stage=0)
    ran(tmp_path, "r", *options, "trainer.max_steps=15", stage=0)
    assert steps_of(path, Resumed) == [6]
    train(tmp_path, *options, "run_id=a", "trainer.max_steps=6", base=TRAINED)
    _, alone = train(tmp_path, *options, "run_id=a", "trainer.max_steps=15", base=TRAINED)
    assert losses_of(path) == pytest.approx(losses_of(alone), rel=1e-3)
    steps = [{g["step"] for g in state_of(p)[1]["param_groups"]} for p in (path, alone)]
    assert steps == [{15}, {15}]
    assert_same_state(state_of(path), state_of(alone), 1e-2)


# ---- a script of one's own ----


def script_on_rank(stage, autocast):
    """Run the lines of docs/reference/backends.md, and return gradients and weights."""
    with deepspeed_here(stage):
        import deepspeed

        model, out = tiny_model(), []
        optimizer = sgd(model)
        kfac = make_kfac(model, optimizer, {"spread": False}, collective=TorchCollective())
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 8,
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
                "torch_autocast": {"enabled": autocast, "dtype": "bfloat16"},
            },
        )
        try:
            for step in range(STEPS):
                for x, y in zip(*(t.chunk(2) for t in my_part(*batch(step))), strict=True):
                    _, loss = loss_of(engine, x, y)
                    engine.backward(loss)
                    if engine.is_gradient_accumulation_boundary():
                        with whole_gradients(engine):
                            kfac.step()
                            grads = [p.grad.clone() for p in model.parameters()]
                    engine.step()
                out.append((grads, weights_of(model)))
        finally:
            engine.destroy()
        return out


@pytest.mark.parametrize("stage", STAGES)
def test_a_script_with_whole_gradients_equals_one_process(stage):
    for got in run_ranks(2, script_on_rank, stage, False):
        wanted = one_process(tiny_model, batch, (("spread", False),))
        for (grads, weights), (want_grads, want_weights, _) in zip(got, wanted, strict=True):
            assert_close(grads, want_grads)
            assert_close(weights, want_weights)


@pytest.mark.parametrize("stage", STAGES)
def test_a_script_may_use_deepspeeds_autocast(stage):
    (got, twin), wanted = (
        run_ranks(2, script_on_rank, stage, True),
        one_process(tiny_model, batch, (("spread", False),)),
    )
    assert_close(got[-1][1], wanted[-1][1], 0.03)
    assert sha256(got[-1][1]) == sha256(twin[-1][1])


def attached_on_rank(stage, method="eigen"):
    """Train a step with the one-line form; return the weights, or what the error says."""
    with deepspeed_here(stage):
        import deepspeed

        model, options = tiny_model(), {"method": method, "spread": False}
        optimizer = optimizer_of(model, options)
        make_kfac(model, optimizer, options, collective=TorchCollective()).attach()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 16,
                "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
            },
        )
        try:
            engine.backward(loss_of(engine, *my_part(*batch(0)))[1])
            engine.step()
        except RuntimeError as error:
            return str(error)
        finally:
            engine.destroy()
        return weights_of(model)


@pytest.mark.slow
def test_the_one_line_form_works_without_zero_and_is_refused_with_zero():
    wanted = one_process(tiny_model, batch, (("spread", False),))[0][1]
    for weights in run_ranks(2, attached_on_rank, 0):
        assert_close(weights, wanted)
    for said in run_ranks(2, attached_on_rank, 2):
        assert "call step() inside whole_gradients(engine)" in said
    for said in run_ranks(2, attached_on_rank, 1, "eigen_adam"):
        assert "EigenAdam needs whole weights, so use ZeRO stage 0" in said


def failed_on_rank():
    model = tiny_model()
    with deepspeed_here(1):
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=sgd(model),
            config={
                "train_micro_batch_size_per_gpu": 16,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
            },
        )
        engine.backward(loss_of(engine, *my_part(*batch(0)))[1])
        try:
            with whole_gradients(engine):
                assert all(p.grad is not None for p in model.parameters())
                raise KeyError("from the block")
        except KeyError:
            return [p.grad is None for p in model.parameters()]
        finally:
            engine.destroy()


@pytest.mark.slow
def test_an_error_inside_the_block_leaves_no_whole_gradients():
    for each in run_ranks(2, failed_on_rank):
        assert all(each)


def refused_on_rank(config):
    with deepspeed_here(1):
        import deepspeed

        model = tiny_model()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=sgd(model),
            config={
                "train_micro_batch_size_per_gpu": 8,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
                **config,
            },
        )
        try:
            with whole_gradients(engine):
                return "entered"
        except ValueError as error:
            return str(error)
        finally:
            engine.destroy()
            # DeepSpeed keeps the setting for all later engines of the process.
            deepspeed.runtime.torch_autocast.TORCH_AUTOCAST_INITIALIZED = False


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"bf16": {"enabled": True}}, "use its torch_autocast section"),
        ({"zero_optimization": {"stage": 3}}, "use stage 2, or FSDP2"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "use bfloat16"),
    ],
    ids=["bf16", "stage 3", "fp16"],
)
def test_an_unsupported_configuration_is_refused(config, said):
    assert all(said in answer for answer in run_ranks(2, refused_on_rank, config))


def example_on_rank():
    with deepspeed_here(2):
        return runpy.run_path(str(ROOT / "examples/deepspeed_training.py"))["main"]()


@pytest.mark.slow
def test_the_example_script_runs():
    accuracies = run_ranks(2, example_on_rank)
    assert accuracies[0] == accuracies[1] > 0.9


# ---- the command ----


@pytest.mark.slow
@pytest.mark.supports("deepspeed zero 2", "kfac-train")
@pytest.mark.supports("deepspeed zero 2", "documented command")
def test_the_documented_command_trains(tmp_path):
    """The ranks are forks with torchrun's variables, which import DeepSpeed for the first time."""
    options = [*SMALL, "backend=deepspeed", "backend.zero_stage=2", "trainer.max_steps=6"]
    options += [f"runs_dir={tmp_path}", "run_id=r"]
    ended = launch.by_hand(tmp_path, 2, options, is_slow=False)
    said = ended.out + ended.errors
    assert ended.codes == [0, 0], said
    assert [e.step for e in of_kind(tmp_path / "r", Evaluated)][-1] == 6
    for noise in ("DeepSpeed", "deepspeed", "Warning", "builtins", "ninja"):
        assert noise not in said.replace("backend=deepspeed", ""), said


def test_stage_3_is_refused():
    with pytest.raises(UsageError, match=r"backend\.zero_stage=3: .* backend=fsdp2"):
        compose.load(["backend=deepspeed", "backend.zero_stage=3"])
    with pytest.raises(UsageError, match=r"backend\.zero_stage=4: must be at least 0 and at most"):
        compose.load(["backend=deepspeed", "backend.zero_stage=4"])


def test_fused_lamb_is_refused():
    with pytest.raises(UsageError, match=r"optimizer=fused_lamb .* backend=deepspeed"):
        compose.load(["backend=deepspeed", "optimizer=fused_lamb"])


def test_a_missing_deepspeed_is_reported_with_the_install_command(monkeypatch):
    from kfac_bench import distributed

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = compose.load(["backend=deepspeed"]).backend
    with pytest.raises(UsageError, match="DS_BUILD_OPS=0 pip install"), distributed.join(config):
        pass
