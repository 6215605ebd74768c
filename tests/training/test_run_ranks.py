"""One run on several ranks: they stop, fail, refuse and evaluate together."""

import contextlib
import json
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kfac_bench.record.events import Evaluated, Resumed, Trained
from kfac_bench.training import checkpoint, run, run_directory
from kfac_bench.training.run_directory import RunDirectory
from tests.support.distributed import run_ranks
from tests.support.quick import slow
from tests.support.runs import (
    ALONE,
    KFAC,
    METHODS,
    RESNET,
    SMALL,
    before_step,
    config_of,
    end,
    evaluated,
    here,
    of_kind,
    steps_of,
    train,
    train_here,
    trainer_of,
)


@pytest.mark.ranks
@pytest.mark.supports("ddp", "kfac-train")
@pytest.mark.parametrize(
    ("strategy", "method"),
    [("comm_opt", "inverse"), ("layer_wise", "eigen"), slow("layer_wise", "eigen_adam")],
)
def test_an_interrupted_run_on_two_ranks_ends_with_the_same_weights(tmp_path, strategy, method):
    options = (*KFAC, f"kfac={strategy}", f"kfac.method={method}")
    if method == "eigen_adam":
        options = (*METHODS[method], f"kfac.strategy={strategy}")
    options += ("trainer.max_steps=10", "trainer.log_freq=1")
    run_ranks(2, train_here, tmp_path, (*options, "run_id=straight"))
    stopped = run_ranks(2, train_here, tmp_path, (*options, "run_id=stopped"), SMALL, (1, 7))
    assert [s[0] for s in stopped] == ["interrupted", "interrupted"]
    done = run_ranks(2, train_here, tmp_path, (*options, "run_id=stopped"))
    assert [s[0] for s in done] == ["finished", "finished"]
    straight, path = tmp_path / "straight", tmp_path / "stopped"
    assert steps_of(path, Resumed) == [7]
    assert end(path).weights_sha256 == end(straight).weights_sha256
    assert [e.loss for e in of_kind(path, Trained)] == [e.loss for e in of_kind(straight, Trained)]
    assert done[1][1] == "", "rank 1 talks"
    assert done[0][2] == done[1][2], "the ranks' weights differ"
    assert len(checkpoint.find(path)[0].shards) == 2
    assert json.loads((path / "run.json").read_text())["world_size"] == 2
    again = run_ranks(2, train_here, tmp_path, (*options, "run_id=stopped"))
    assert [s[0] for s in again] == ["finished", "finished"]
    assert "is complete" in again[0][1]


@pytest.mark.ranks
def test_an_interrupted_run_with_batch_norm_on_two_ranks(tmp_path):
    # After a step that decomposes all factors, ranks ask each other for signals once more.
    options = (*KFAC, "kfac.early_updates=false", "trainer.max_steps=6", "trainer.eval_freq=2")
    run_ranks(2, train_here, tmp_path, (*options, "run_id=straight"), RESNET)
    run_ranks(2, train_here, tmp_path, (*options, "run_id=stopped"), RESNET, (0, 3))
    run_ranks(2, train_here, tmp_path, (*options, "run_id=stopped"), RESNET)
    straight, path = tmp_path / "straight", tmp_path / "stopped"
    # Rank 1 learns of the signal of step 3 during step 4.
    assert steps_of(path, Resumed) == [4]
    assert end(path).weights_sha256 == end(straight).weights_sha256


@pytest.mark.ranks
def test_all_ranks_stop_one_step_after_the_step_with_the_signal(tmp_path):
    """No evaluation, decomposition or event asks the other ranks before."""
    options = ("kfac=none", "optimizer.lr=0.01", "run_id=r", "trainer.max_steps=9")
    options += tuple(f"trainer.{name}_freq=100" for name in ("log", "eval", "checkpoint"))
    stopped = run_ranks(2, train_here, tmp_path, options, SMALL, (1, 3))
    assert [s[0] for s in stopped] == ["interrupted", "interrupted"]
    assert end(tmp_path / "r").step == checkpoint.find(tmp_path / "r")[0].step == 4


@pytest.mark.ranks
def test_a_loss_that_is_not_finite_on_one_rank_stops_both(tmp_path):
    options = ("trainer.max_steps=10", "run_id=r", *KFAC)
    results = run_ranks(2, train_here, tmp_path, options, SMALL, None, (1, 7))
    assert [r[0] for r in results] == ["failed", "failed"]
    path = tmp_path / "r"
    assert "at step 7" in end(path).message
    assert end(path).step == 6
    assert checkpoint.find(path)[0].step == 5


def evaluate_here(folder, saved, examples):
    """Return the validation metrics of saved weights on this rank, whose buffers are its own."""
    backend = here() if dist.is_initialized() else ALONE
    trainer = trainer_of(folder, base=RESNET, backend=backend)
    trainer.restore(checkpoint.load(saved))
    for buffer in trainer._bare.buffers():
        if buffer.is_floating_point():
            buffer.add_(backend.ranks.rank)
    if examples is not None:
        trainer.data.eval_size = examples
    return evaluated(trainer)


@pytest.mark.ranks
def test_validation_metrics_are_exact_on_any_number_of_ranks(tmp_path):
    _, path = train(tmp_path, *KFAC, "trainer.max_steps=21", base=RESNET)
    saved = checkpoint.find(path)[0].path
    for examples in (None, 3):  # 450 do not divide by 4; 3 leave a rank without any
        alone = evaluate_here(tmp_path, saved, examples)
        if examples is None:
            assert alone == of_kind(path, Evaluated)[-1].metrics
            assert 0.2 < alone["accuracy"] < 1
            assert alone["accuracy"] * 450 == pytest.approx(round(alone["accuracy"] * 450))
        for world in (2, 4):
            for metrics in run_ranks(world, evaluate_here, tmp_path, saved, examples):
                assert metrics["accuracy"] == alone["accuracy"]
                assert metrics["loss"] == pytest.approx(alone["loss"], rel=1e-5, abs=1e-8)


def refused_here(folder, overrides, lock):
    """Return the error of run.train on this rank, which must come within a minute.

    A rank that waits for another would wait for ever. The first call of a fresh pool imports the
    harness on each rank, which takes over ten seconds on a busy machine.
    """
    backend, outcome = here(), []
    config = config_of(folder, *overrides)

    run_directory._PATIENCE_S = 0.3  # of this process, a rank of the tests

    def attempt():  # signals are for the main thread: fit would not work here
        with contextlib.ExitStack() as stack:
            if lock and backend.ranks.is_main:
                stack.enter_context(RunDirectory(config).open(config, {}))
            try:
                outcome.append(run.train(config, backend))
            except BaseException as error:
                outcome.append((type(error).__name__, str(error)))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(60)
    assert outcome, "hangs: rank 0 has given up"
    return outcome[0]


@pytest.mark.ranks
@pytest.mark.parametrize("reason", ["lock", "configuration", "resume"])
def test_bad_input_is_refused_on_all_ranks(tmp_path, reason):
    options = ["trainer.max_steps=5", "run_id=mine"]
    train(tmp_path, *options)
    options += {
        "lock": [],
        "configuration": ["seed=3"],
        "resume": ["run_id=new", "resume=/nowhere"],
    }[reason]
    outcomes = run_ranks(2, refused_here, tmp_path, options, reason == "lock")
    assert [kind for kind, _ in outcomes] == ["UsageError", "UsageError"]
    assert len(outcomes[0][1].splitlines()) == 1


def limited_here(folder):
    """Train up to a limit of 500 s, twice; the clock of rank 1 is far ahead."""
    backend = here()
    more = ("trainer.max_train_s=500", "trainer.eval_freq=2", "trainer.max_steps=8", "run_id=mine")
    more += ("trainer.log_freq=2",)
    config = config_of(folder, *KFAC, *more)

    def advance(trainer):
        if backend.ranks.rank == 1:
            trainer.clock.set(1000.0)
            trainer.clock.start()

    with before_step(1, advance):
        first = run.train(config, backend)
    return first, run.train(config, backend)


@pytest.mark.ranks
def test_the_clock_of_the_slowest_rank_ends_a_run_and_stays_in_its_files(tmp_path):
    assert run_ranks(2, limited_here, tmp_path) == [(("finished", 0), ("finished", 0))] * 2
    path = tmp_path / "mine"
    assert steps_of(path, Resumed) == [], "the second start went on"
    assert (end(path).step, end(path).train_s > 500) == (2, True)
    assert [e.train_s > 500 for e in of_kind(path, Trained)] == [True]
    assert [e.train_s > 500 for e in of_kind(path, Evaluated)] == [False, True]
    assert checkpoint.find(path)[0].shards[0]["train_s"] > 500


def gathered_here():
    ranks = here().ranks
    return ranks.gather(bytes([ranks.rank]) * 3 * ranks.rank + b"\xff\x00" * (ranks.rank == 2))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_gathers_the_values_of_all_ranks(world):
    each = [b"", b"\1\1\1", b"\2" * 6 + b"\xff\x00", b"\3" * 9][:world]
    assert run_ranks(world, gathered_here) == [each] * world


def shared_here():
    module = nn.Module()
    module.register_buffer("every_second", (torch.arange(8.0) + 8 * dist.get_rank())[::2])
    here().ranks.share_buffers(module)
    return module.every_second.tolist()


@pytest.mark.ranks
def test_a_buffer_with_gaps_in_memory_is_shared():
    assert run_ranks(2, shared_here) == [[0, 2, 4, 6]] * 2


def agreed_here():
    ranks = here().ranks
    return [ranks.any(ranks.rank == number) for number in range(3)]


@pytest.mark.ranks
def test_a_flag_of_any_rank_counts_on_all_ranks():
    assert run_ranks(2, agreed_here) == [[True, True, False]] * 2
