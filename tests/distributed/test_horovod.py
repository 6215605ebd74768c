"""The Horovod backend on real ranks of Horovod trains like one process."""

import importlib.util
import os
import subprocess
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp.grad_scaler import GradScaler

from kfac_bench import cli
from kfac_bench.config import compose
from kfac_bench.core import KFAC
from kfac_bench.core.planning.plan import STRATEGIES
from kfac_bench.record.events import Evaluated, Resumed, Trained
from kfac_bench.training import checkpoint
from kfac_bench.training.build import build_optimizer
from tests.support import forks, horovod_ranks
from tests.support.distributed import run_ranks as gloo_ranks
from tests.support.horovod_ranks import BIN, here, run_ranks
from tests.support.quick import slow
from tests.support.runs import ALONE, SMALL, of_kind, steps_of, train, train_here
from tests.support.runs import KFAC as KFAC_RUN
from tests.support.training import (
    OPTIONS,
    STEPS,
    Mixed,
    assert_close,
    batch,
    expected,
    loss_of,
    make_kfac,
    my_part,
    one_process,
    optimizer_of,
    sentences,
    sgd,
    sha256,
    tiny_model,
    weights_of,
)

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        importlib.util.find_spec("horovod") is None,
        reason="Horovod is not installed: make install-horovod",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _pools():
    yield
    horovod_ranks.close_pools()


def prepare(make_model, **options):
    """Make this rank's backend, model, K-FAC and optimizer as a run does."""
    backend = here()
    model, kfac, optimizer = with_kfac(make_model, backend, options)
    model, optimizer = backend.wrap(model, optimizer)
    return backend, model, kfac, optimizer


def with_kfac(make_model, backend, options):
    model = make_model()
    optimizer = optimizer_of(model, options)
    return model, make_kfac(model, optimizer, options, collective=backend.collective()), optimizer


def update(backend, model, kfac, optimizer, x, y, parts=1, scaler=None, dtype=None):
    """Update like `kfac_bench.training.update.Update`, and return the preconditioned gradients."""
    scaler = scaler or GradScaler("cpu", enabled=False)
    optimizer.zero_grad()
    for i, (a, b) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
        with backend.part(model, last=i == parts - 1):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = loss_of(model, a, b)[1] / parts
            backend.backward(scaler.scale(loss))
    backend.synchronize(optimizer)
    scaler.unscale_(optimizer)
    kfac.step(scaler.get_scale)
    grads = [p.grad.clone() for p in model.parameters()]
    backend.step(optimizer, scaler)
    scaler.update()
    return grads


def mine(backend, tensors):
    return my_part(*tensors, rank=backend.ranks.rank, world=backend.ranks.world_size)


def equals_here(make_model, make_batch, options, strategies, tolerance, how, wanted):
    """Compare each strategy with one process, on every rank, and return hashes of the weights."""
    digests = []
    if wanted:  # arrays, because tensors cannot be sent between pools
        wanted = [[[torch.tensor(x) for x in e] for e in s[:2]] + [()] for s in wanted]
    else:
        wanted = one_process(make_model, make_batch, tuple(options.items()))
    if "dtype" in how:  # one process computes in this precision too
        enabled = how["dtype"] == torch.float16
        how = how | {"scaler": GradScaler("cpu", init_scale=256.0, enabled=enabled)}
        alone = (ALONE, *with_kfac(make_model, ALONE, options))
        wanted = [
            (update(*alone, *make_batch(step), **how), weights_of(alone[1]), ())
            for step in range(STEPS)
        ]
    for strategy in strategies:
        made = prepare(make_model, **options, strategy=strategy)
        for step, (want_grads, want_weights, _) in enumerate(wanted):
            grads = update(*made, *mine(made[0], make_batch(step)), **how)
            assert_close(grads, want_grads, tolerance)
            assert_close(weights_of(made[1]), want_weights, tolerance)
        assert made[2].steps == STEPS
        assert made[2].dropped_statistics == 0
        digests.append(sha256(weights_of(made[1])))
    return digests


def equal(world, *strategies, data=(tiny_model, batch), tolerance=2e-4, how=None, **options):
    wanted = None
    if "local_factors" in strategies:
        (wanted, *_) = gloo_ranks(world, expected, *data, "local_factors", options)
        wanted = [[[x.numpy() for x in each] for each in step[:2]] + [()] for step in wanted]
    results = run_ranks(
        world, equals_here, *data, options, strategies, tolerance, how or {}, wanted
    )
    assert results == [results[0]] * world, "the ranks' weights differ"


@pytest.mark.supports("horovod", "{strategy}")
@pytest.mark.parametrize(
    ("world", "strategy", "method"),
    [
        # On two ranks, hybrid_opt is mem_opt.
        *((2, s, "eigen") for s in STRATEGIES if s != "hybrid_opt"),
        slow(2, "mem_opt", "eigen_adam"),
        slow(4, "hybrid_opt", "eigen"),
        slow(4, "layer_wise", "eigen"),
    ],
)
def test_a_strategy_equals_one_process(world, strategy, method):
    equal(world, strategy, method=method)
    if world == 4 and strategy == "hybrid_opt":
        assert {tuple(s) for s in run_ranks(4, process_sets_here)[0]} > {(0, 1, 2, 3)}


def process_sets_here():
    from horovod.common.process_sets import _basics

    return list(_basics._get_process_set_ids_and_ranks().values())


@pytest.mark.parametrize(("strategy", "method"), [("comm_opt", "ekfac"), slow("mem_opt", "eigen")])
def test_every_kind_of_layer_equals_one_process(strategy, method):
    equal(2, strategy, data=(Mixed, sentences), method=method, skip=(), max_dim=10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)])
def test_messages_in_half_precision_are_close(dtype):
    """One process keeps its state in half precision too, so only rounding differs."""
    equal(2, "comm_opt", "mem_opt", method="eigen", state_dtype=dtype, damping=0.3, tolerance=0.1)


@pytest.mark.supports("horovod", "gradient accumulation")
@pytest.mark.parametrize("strategy", [slow("comm_opt"), "mem_opt"])
def test_gradient_accumulation_equals_one_process(strategy):
    equal(2, strategy, method="eigen", how={"parts": 2})


def messages_here():
    """Return the names of the gradients sent after each of three parts, on every rank."""
    import horovod.torch.optimizer as averaging

    made, sent, seen = prepare(tiny_model), [], []
    send = averaging.allreduce_async_

    def note(tensor, *args, name, **more):
        sent.append(name)
        return send(tensor, *args, name=name, **more)

    with mock.patch.object(averaging, "allreduce_async_", note):
        backward = made[0].backward

        def count(loss):
            backward(loss)
            seen.append(len(sent))

        made[0].backward = count
        update(*made, *mine(made[0], [t[:18] for t in batch(0)]), parts=3)
    return seen, len(sent)


def test_ranks_meet_at_the_last_part_only():
    parameters = len(list(tiny_model().parameters()))
    assert run_ranks(2, messages_here) == [([0, 0, parameters], parameters)] * 2


@pytest.mark.supports("horovod", "bf16 autocast")
def test_autocast_is_close_to_one_process():
    equal(2, "comm_opt", method="eigen", how={"dtype": torch.bfloat16}, damping=0.3, tolerance=0.2)


@pytest.mark.supports("horovod", "fp16 with GradScaler")
def test_a_scaled_loss_is_close_to_one_process():
    equal(2, "mem_opt", method="eigen", how={"dtype": torch.float16}, damping=0.3, tolerance=0.1)


def overflow_here():
    """Make an update whose gradients overflow on rank 1 only, then a good update."""
    made, scaler = prepare(tiny_model), GradScaler("cpu", init_scale=256.0)
    before = weights_of(made[1])
    x, y = mine(made[0], batch(0))
    bad = x * float("inf") if made[0].ranks.rank == 1 else x
    update(*made, bad, y, scaler=scaler)
    torch.testing.assert_close(weights_of(made[1]), before, rtol=0, atol=0)
    assert scaler.get_scale() == 128.0
    update(*made, x, y, scaler=scaler)
    assert scaler.get_scale() == 128.0
    return sha256(weights_of(made[1]))


def test_an_overflow_on_one_rank_skips_the_update_on_all():
    first, second = run_ranks(2, overflow_here)
    assert first == second != sha256(weights_of(tiny_model()))


class Forked(nn.Module):
    """A model whose examples decide which branch runs. One branch never runs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.branches = nn.ModuleList(nn.Linear(36, 3) for _ in range(3))

    def forward(self, x):
        return self.branches[int(x[0, 0, 0, 0] > 0)](x.flatten(1))


def unused_here(parts):
    """Train a model with a branch that backward reaches on one rank only."""
    made = prepare(Forked)
    for step in range(3):
        x, y = mine(made[0], batch(step))
        update(*made, x.clone().index_fill_(0, torch.tensor([0]), made[0].ranks.rank), y, parts)
    return sha256(weights_of(made[1]))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_layer_without_gradient_on_one_rank_keeps_ranks_equal(parts):
    first, second = run_ranks(2, unused_here, parts)
    assert first == second


def other_model_here():
    def other():
        model = tiny_model()
        return model.append(nn.Linear(3, 3)) if backend.ranks.rank == 1 else model

    backend = here()
    with pytest.raises(RuntimeError, match=r"ranks \[1\] made another K-FAC plan than rank 0"):
        prepare(other)


def test_a_rank_with_another_model_gets_an_error():
    run_ranks(2, other_model_here)


def other_weights_here():
    def other():
        model = tiny_model()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(here().ranks.rank)
        model.register_buffer("mask", torch.tensor([here().ranks.rank == 0]))
        model.register_buffer("table", torch.full((3,), here().ranks.rank, dtype=torch.bfloat16))
        return model

    model = prepare(other)[1]
    assert model.mask.tolist() == [True]
    assert model.table.tolist() == [0, 0, 0]
    return sha256(weights_of(model))


def test_all_ranks_start_with_the_weights_of_rank_0():
    assert run_ranks(2, other_weights_here) == [sha256(weights_of(tiny_model()))] * 2


def settings_here(words):
    """Return the settings of the optimizer of a run, without Horovod and with it."""
    model = tiny_model()
    plain = build_optimizer(compose.load(words.split()).optimizer, model)
    names = ("block_size", "graft_type", "matrix_eps", "pre_norm", "rule")
    kept = {name: getattr(plain, name) for name in names if hasattr(plain, name)}
    _, averaging = here().wrap(model, plain)
    return kept, {name: getattr(averaging, name) for name in kept}


@pytest.mark.parametrize(
    "words", ["optimizer=lamb", "optimizer=shampoo optimizer.block_size=7", "optimizer=eigen_adam"]
)
def test_optimizers_keep_settings_that_are_in_no_group(words):
    plain, averaging = run_ranks(2, settings_here, words)[0]
    assert plain
    assert plain == averaging


def script_here():
    """Run a user's script with two models at once, in which K-FAC finds Horovod.

    K-FAC is attached to the second optimizer.
    """
    import horovod.torch as hvd

    models = [tiny_model(), tiny_model()]
    optimizers = [hvd.DistributedOptimizer(sgd(m), m.named_parameters()) for m in models[:1]]
    optimizers.append(hvd.DistributedOptimizer(sgd(models[1]), prefixed(models[1])))
    kfacs = [KFAC(m, o, **OPTIONS) for m, o in zip(models, optimizers, strict=True)]
    kfacs[1].attach()
    for step in range(STEPS):
        x, y = my_part(*batch(step), rank=hvd.rank(), world=hvd.size())
        for model in models:
            F.cross_entropy(model(x), y).backward()
        optimizers[0].synchronize()
        kfacs[0].step()
        with optimizers[0].skip_synchronize():
            optimizers[0].step()
        if step % 2:  # as a script that clips
            optimizers[1].synchronize()
            with optimizers[1].skip_synchronize():
                optimizers[1].step()
        else:
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert [kfac.steps for kfac in kfacs] == [STEPS, STEPS]
    want = one_process(tiny_model, batch, ())[-1][1]
    for model in models:
        assert_close(weights_of(model), want)


def prefixed(model):
    return [(f"second.{n}", p) for n, p in model.named_parameters()]


def test_a_script_may_train_two_models():
    run_ranks(2, script_here)


def static_here():
    """Ask for a group of ranks that `hvd.init()` does not allow."""
    import horovod.torch as hvd

    refuse = mock.Mock(side_effect=ValueError("Set HOROVOD_DYNAMIC_PROCESS_SETS=1"))
    with (
        mock.patch.object(hvd, "add_process_set", refuse),
        pytest.raises(RuntimeError, match=r'call hvd.init\(process_sets="dynamic"\)'),
    ):
        here().collective().prepare([(1,)])


def test_groups_need_dynamic_process_sets():
    run_ranks(2, static_here)


# Runs


RUN = (*KFAC_RUN, "optimizer.lr=0.02", "kfac.damping=0.1", "kfac.spread=false")
"""Stable options, with the same decompositions on any number of ranks."""


def run_here(folder, overrides):
    with mock.patch("tests.support.runs.here", here):
        return train_here(folder, overrides)


@pytest.mark.supports("horovod", "resume on another world size")
@pytest.mark.slow
def test_a_run_continues_without_horovod_and_back(tmp_path):
    _, alone = train(tmp_path, *RUN, "run_id=alone", "trainer.max_steps=15")
    # Horovod, then one process, then Horovod again.
    run_ranks(2, run_here, tmp_path, (*RUN, "run_id=r", "trainer.max_steps=5"))
    _, path = train(tmp_path, *RUN, "run_id=r", "trainer.max_steps=10")
    done = run_ranks(2, run_here, tmp_path, (*RUN, "run_id=r", "trainer.max_steps=15"))
    assert steps_of(path, Resumed) == [5, 10]
    assert done[0][2] == done[1][2], "the ranks' weights differ"
    ours, theirs = (of_kind(p, Evaluated)[-1].metrics["squared_error"] for p in (path, alone))
    assert ours == pytest.approx(theirs, rel=1e-4)
    saved = [checkpoint.load(checkpoint.find(p)[0].path).shards[0] for p in (path, alone)]
    momenta = [
        [s["momentum_buffer"] for s in shard["optimizer"]["state"].values()] for shard in saved
    ]
    assert_close(*momenta, 1e-3)


@pytest.mark.parametrize("precision", ["bf16", slow("fp16")])
def test_a_run_with_accumulation_and_mixed_precision_trains(tmp_path, precision):
    options = (*RUN, "run_id=r", "trainer.max_steps=4", "trainer.accumulate=3")
    run_ranks(2, run_here, tmp_path, (*options, f"trainer.precision={precision}"))
    losses = [e.metrics["squared_error"] for e in of_kind(tmp_path / "r", Evaluated)]
    assert losses[-1] < losses[0]


def horovodrun(*overrides, world=2):
    # The ranks of other tests would take processor time from those of the command.
    horovod_ranks.close_pools()
    command = [BIN / "horovodrun", "-np", str(world), "--gloo", BIN / "kfac-train"]
    return subprocess.run(
        [*command, "backend=horovod", *overrides], capture_output=True, text=True, timeout=250
    )


@pytest.mark.slow
@pytest.mark.supports("horovod", "kfac-train")
@pytest.mark.supports("horovod", "documented command")
def test_the_documented_command_trains(tmp_path):
    run = (*SMALL, *RUN, f"runs_dir={tmp_path}", "trainer.max_steps=5", "trainer.log_freq=1")
    done = horovodrun(*run, "run_id=r", "kfac=mem_opt")
    assert done.returncode == 0, done.stdout + done.stderr
    path = tmp_path / "r"
    assert steps_of(path, Trained) == [1, 2, 3, 4, 5]
    assert len(checkpoint.find(path)[0].shards) == 2
    assert (done.stdout + done.stderr).count("K-FAC preconditions") == 1
    _, alone = train(tmp_path, *RUN, "run_id=alone", "trainer.max_steps=5")
    ours, theirs = (of_kind(p, Evaluated)[-1].metrics["squared_error"] for p in (path, alone))
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_bad_input_is_reported_once_even_if_rank_0_is_last(tmp_path, monkeypatch):
    late = "import os, time\nif os.environ.get('HOROVOD_RANK') == '0':\n    time.sleep(1)\n"
    (tmp_path / "sitecustomize.py").write_text(late)
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{path}")
    done = horovodrun(*SMALL, f"runs_dir={tmp_path}", "kfac.update_freq=0")
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert said.count("kfac-train: kfac.update_freq=0") == 1, said
    assert "Exit code: 2" in said


def alone_in_a_fork(words):
    with pytest.raises(SystemExit) as stop:
        cli.train(words)
    return stop.value.code


@pytest.mark.slow
def test_without_horovodrun_a_process_trains_alone(tmp_path):
    run = (*SMALL, f"runs_dir={tmp_path}", "run_id=r", "trainer.max_steps=2")
    assert forks.call(alone_in_a_fork, ["backend=horovod", *run]) == 0
    assert len(checkpoint.find(tmp_path / "r")[0].shards) == 1
