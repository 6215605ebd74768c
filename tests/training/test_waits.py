"""An ordinary training step never waits for the device: forward, backward, K-FAC, optimizer."""

import contextlib

import pytest
import torch

from kfac_bench.distributed.backend import Backend
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.training import step_results
from kfac_bench.training.step_results import PendingStepResults
from kfac_bench.training.update import Update
from tests.support.quick import quick_if, slow
from tests.support.reads import (
    WaitError,
    allowed,
    refuse_reads,
    refuse_waits_on_meta,
    steps_on_meta,
)
from tests.support.runs import ALONE, RESNET, SMALL, trainer_of

META = Backend(Ranks(torch.device("meta")))
DEVICES = pytest.mark.parametrize("device", ["cpu", "meta"])
ORDINARY = (
    *("trainer.log_freq=100", "trainer.eval_freq=100", "trainer.max_steps=100"),
    *("kfac.update_freq=100", "kfac.factor_update_freq=2", "kfac.spread=false"),
    "kfac.early_updates=false",
)
"""Steps without events, evaluations and decompositions, after the first one."""


@pytest.fixture(autouse=True)
def outcomes(monkeypatch):
    """Allow the one read that a step makes; return the steps whose outcomes were read."""
    read, start, steps = PendingStepResults.read, step_results._start, []

    def late(self):
        with allowed():
            found = read(self)
        if found is not None:
            steps.append(found.step)
        return found

    monkeypatch.setattr(PendingStepResults, "read", late)
    monkeypatch.setattr(
        step_results,
        "_start",
        lambda ranks, x: (lambda: [1.0, 0.0, 0.0]) if x.is_meta else start(ranks, x),
    )
    return steps


def host_tensors(trainer):
    """What is on the host on a GPU as well, and what the GradScaler reads."""
    optimizer, scaler = trainer.optimizer, trainer._update.scaler
    counts = [state["step"] for state in optimizer.state.values() if "step" in state]
    overflows = scaler._found_inf_per_device(optimizer).values() if scaler.is_enabled() else ()
    return [*(x for x in counts if isinstance(x, torch.Tensor)), *overflows]


def take_steps(folder, device, *options, base=SMALL):
    """Take a first step, and then steps in which nothing may wait."""
    backend = META if device == "meta" else ALONE
    trainer = trainer_of(folder, *ORDINARY, *options, base=base, backend=backend)
    refuse = (
        refuse_waits_on_meta
        if device == "meta"
        else lambda: refuse_reads(lambda: host_tensors(trainer))
    )
    with contextlib.ExitStack() as stack:
        if trainer.kfac is not None:
            stack.callback(trainer.kfac.detach)
        stack.enter_context(steps_on_meta())
        batches = trainer._rank_batches.train(0)
        trainer._train_step(trainer._to_device(next(batches)))
        for _ in range(2):
            batch = next(batches)
            with refuse():
                trainer._train_step(trainer._to_device(batch))


KINDS = {
    "kfac": (),
    "inverse, mc": ("kfac.method=inverse", "kfac.fisher=mc"),
    "ekfac, type2": ("kfac.method=ekfac", "kfac.fisher=type2"),
    "adaptive": ("kfac.adaptive_damping=true", "kfac.damping_freq=100"),
    "parts": ("trainer.accumulate=3",),
    "eigen_adam": ("optimizer=eigen_adam",),
    "unreadable files": ("data.on_error=skip",),
}
OPTIMIZERS = (
    *("sgd", "adam", "adamw", "lamb", "lars", "muon"),
    *("shampoo", "soap"),
)


@DEVICES
@pytest.mark.parametrize("kind", quick_if(("kfac", "parts").__contains__, KINDS))
def test_a_step_with_kfac_does_not_wait(tmp_path, outcomes, device, kind):
    take_steps(tmp_path, device, *KINDS[kind])
    assert outcomes == [1, 2], "the last outcome is still in flight"


@DEVICES
@pytest.mark.parametrize("optimizer", ["sgd", "adam", *map(slow, OPTIMIZERS[2:])])
def test_a_step_of_an_optimizer_does_not_wait(tmp_path, device, optimizer):
    take_steps(tmp_path, device, "kfac=none", f"optimizer={optimizer}", "optimizer.lr=0.0001")


@DEVICES
def test_a_step_with_batch_norm_does_not_wait(tmp_path, device):
    options = ("kfac.fisher=mc", "task.label_smoothing=0.1", "trainer.channels_last=true")
    take_steps(tmp_path, device, *options, base=RESNET)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_in_half_precision_does_not_wait(tmp_path, precision):
    take_steps(tmp_path, "cpu", f"trainer.precision={precision}")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["pydoc_transformer", "pictures_unet"])
def test_a_step_of_other_tasks_does_not_wait(tmp_path, task):
    take_steps(tmp_path, "cpu", "logger=none", base=(f"experiment=embedded/{task}",))


@DEVICES
def test_a_read_in_a_step_is_found(tmp_path, monkeypatch, device):
    step = Update.step

    def wait(self, batch, loss):
        step(self, batch, loss)
        if self._kfac.steps > 1:
            assert loss.item() > 0

    monkeypatch.setattr(Update, "step", wait)
    with pytest.raises(WaitError):
        take_steps(tmp_path, device)
