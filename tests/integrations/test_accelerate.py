"""One call in a script with the real Accelerator, and a loop with timm's parts."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from kfac_bench import KFAC, eigen_adam
from kfac_bench.core.eigen_adam_optimizer import EigenAdam
from tests.support.distributed import run_ranks
from tests.support.examples import run_example

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

from kfac_bench.integrations.accelerate import attach_kfac, check_engine

OPTIONS = {"damping": 0.03, "update_freq": 4, "factor_update_freq": 2}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, generator=generator)
    return x, x[:, :3].argmax(1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Script:
    """A script with an Accelerator: 2 micro-batches per step, gradients are clipped."""

    def __init__(self, scaler=None, options=OPTIONS, make_optimizer=sgd, attaches=True):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        if scaler is not None:  # Accelerate makes one on a GPU only
            self.accelerator.scaler = scaler
        model = network()
        optimizer = make_optimizer(model.parameters() if attaches else model)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if scaler is not None:  # after prepare, so that the model computes in float32
            self.accelerator.native_amp = True
            self.accelerator.state._mixed_precision = "fp16"
        if attaches:
            self.kfac = attach_kfac(self.accelerator, self.model, self.optimizer, **options)
        else:
            self.kfac = optimizer.preconditioner

    def train(self, begin, end):
        for step in range(begin, end):
            with self.accelerator.accumulate(self.model):
                x, y = batch(step * self.accelerator.num_processes + self.accelerator.process_index)
                self.accelerator.backward(F.cross_entropy(self.model(x), y))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return {k: v.clone() for k, v in self.model.state_dict().items()}


@pytest.fixture(autouse=True)
def fresh():
    yield
    forget()


def forget():
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def assert_equal(got, want):
    for key, value in want.items():
        assert torch.equal(got[key], value), key


def test_a_script_does_what_a_loop_does():
    got = Script().train(0, 8)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kfac = KFAC(model, optimizer, **OPTIONS)
    for step in range(8):
        x, y = batch(step)
        (F.cross_entropy(model(x), y) / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            kfac.step()
            optimizer.step()
            optimizer.zero_grad()
    assert kfac.steps == 4
    assert_equal(got, model.state_dict())


def test_a_grad_scaler():
    want, want_factors = Script(), None
    want.train(0, 8)
    want_factors = want.kfac.state_dict()["layers"]
    forget()
    got = Script(torch.amp.GradScaler("cpu", init_scale=2.0**10))
    got.train(0, 8)
    for key, value in want.model.state_dict().items():
        torch.testing.assert_close(got.model.state_dict()[key], value, msg=key)
    for name, entry in got.kfac.state_dict()["layers"].items():
        torch.testing.assert_close(entry["G"]["factor"], want_factors[name]["G"]["factor"])


def test_a_skipped_step_leaves_no_trace():
    """The overflow comes when factors are due: its statistics are discarded with its gradients."""
    results = []
    for overflows in (True, False):
        forget()
        script = Script(torch.amp.GradScaler("cpu", init_scale=2.0**10))
        before = script.train(0, 4)
        if overflows:
            script.accelerator.scaler._scale.fill_(float("inf"))
            assert_equal(script.train(4, 6), before)
            assert script.optimizer.step_was_skipped
            script.accelerator.scaler._scale.fill_(2.0**10)
        torch.manual_seed(1)
        results.append(script.train(6, 14))
        assert script.kfac.steps == 6
    assert_equal(*results)


def test_a_loaded_state_continues_bit_by_bit(tmp_path):
    script = Script()
    script.train(0, 6)
    script.accelerator.save_state(tmp_path)
    want = script.train(6, 14)
    forget()
    resumed = Script()
    resumed.accelerator.load_state(tmp_path)
    assert resumed.kfac.steps == 3
    assert_equal(resumed.train(6, 14), want)


OFTEN = {"update_freq": 2, "factor_update_freq": 1}
EIGEN = {"make_optimizer": EigenAdam, "options": OFTEN}
ALONE = {"make_optimizer": partial(eigen_adam, kfac=OFTEN), "attaches": False}


@pytest.mark.parametrize("options", [EIGEN, ALONE], ids=["attach_kfac", "alone"])
def test_eigen_adam_continues_bit_by_bit_and_needs_no_options(tmp_path, options):
    script = Script(**options)
    before = script.train(0, 6)
    script.accelerator.save_state(tmp_path)
    want = script.train(6, 14)
    assert script.kfac.plan.method == "eigen_adam"
    assert not torch.equal(before["0.weight"], want["0.weight"])
    forget()
    resumed = Script(**options)
    resumed.accelerator.load_state(tmp_path)
    assert_equal(resumed.train(6, 14), want)


def test_wrong_use_is_refused():
    model = network()
    with pytest.raises(ValueError, match="a SGD that Accelerate has not prepared"):
        attach_kfac(Accelerator(cpu=True), model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"DEEPSPEED.*examples/deepspeed_training.py"):
        check_engine(DistributedType.DEEPSPEED)


def test_another_kfac_takes_the_place_of_a_detached_one(tmp_path):
    script = Script()
    script.kfac.detach()
    script.kfac = attach_kfac(script.accelerator, script.model, script.optimizer, **OPTIONS)
    script.train(0, 4)
    script.accelerator.save_state(tmp_path)
    steps = script.kfac.steps
    forget()
    again = Script()
    again.accelerator.load_state(tmp_path)
    assert again.kfac.steps == steps > 0


def on_rank(folder, options):
    """Save and load in a process of two."""
    environment = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in environment.items()}
    script = Script(options=OPTIONS | options)
    assert script.kfac.collective.world_size == 2
    script.train(0, 4)
    script.accelerator.save_state(folder)
    want = script.train(4, 12)
    forget()
    script = Script(options=OPTIONS | options)
    script.accelerator.load_state(folder)
    assert_equal(script.train(4, 12), want)
    forget()
    return want


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [
        *({"strategy": name} for name in ("comm_opt", "mem_opt", "owner_reduce")),
        {"background": True},
    ],
    ids=str,
)
def test_two_ranks_continue_bit_by_bit(tmp_path, options):
    first, other = run_ranks(2, on_rank, tmp_path, options)
    assert_equal(first, other)


@pytest.mark.slow
def test_the_example_runs_and_learns(tmp_path, monkeypatch):
    variables = run_example("accelerate_training.py", tmp_path, monkeypatch)
    assert list(tmp_path.glob("runs/accelerate/custom_checkpoint_0.pkl"))
    x, y = variables["data"].tensors
    with torch.no_grad():
        assert F.cross_entropy(variables["model"](x), y) < 0.5
