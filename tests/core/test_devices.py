"""A model whose layers are on two GPUs of one process, without a GPU.

Tensors of a FakeTensorMode have a device and a shape, but no values. An operation on tensors of
two devices raises an error, as on real GPUs.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from kfac_bench import KFAC
from kfac_bench.core.capture.moments import Collected
from kfac_bench.core.damping import LevenbergMarquardt, Trial
from kfac_bench.core.distributed.collective import SingleProcess
from kfac_bench.core.execution.decomposition import Eigen
from kfac_bench.core.execution.executor import Request

GPUS = ("cuda:0", "cuda:1")


@pytest.fixture
def model():
    """Two layers of one shape, with gradients."""
    with FakeTensorMode():
        net = nn.Sequential(*(nn.Linear(4, 4, bias=False, device=gpu) for gpu in GPUS))
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        yield net


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("options", [{}, {"grafting": False}, {"trust_ratio": None}])
def test_the_layers_of_two_devices_share_one_clip(model, options):
    kfac = KFAC(model, sgd(model), method="identity", **options)
    kfac.track_cosine = True
    kfac.step()
    assert [str(p.grad.device) for p in model.parameters()] == [*GPUS]


def test_statistics_of_two_devices_are_counted_and_unscaled(model):
    kfac = KFAC(model, sgd(model))
    assert all(len(op.members) == 1 for op in (*kfac.plan.decompose, *kfac.plan.precondition))
    collected = {
        str(i): Collected(*torch.ones(2, 1, 4, 4, device=gpu).unbind(), 8, 8)
        for i, gpu in enumerate(GPUS)
    }
    scale = torch.ones((), device=GPUS[0])
    kfac._guards.see_statistics(collected, scale)
    kfac._executor.run(Request([kfac.plan.factors], None, 0.9, collected, scale))
    weights = kfac._executor.store.weights
    assert [str(weights[name, "A"].device) for name in "01"] == [*GPUS]


def test_conditions_of_two_devices_are_one_copy_from_a_device(model):
    kfac = KFAC(model, sgd(model), method="eigen")
    made = {
        (layer.name, f): Eigen(
            torch.ones(1, 4, device=layer.weight.device),
            torch.ones(1, 4, 4, device=layer.weight.device),
        )
        for layer in kfac._layers
        for f in "AG"
    }
    kfac._executor.store.keep_decompositions(made)
    with pytest.raises(DataDependentOutputException):  # the numbers are read
        kfac.conditions()


def test_an_adaptive_damping_judges_a_step_on_two_devices(model):
    damping = LevenbergMarquardt()
    kfac = KFAC(model, sgd(model), damping=damping)
    factors = {
        (layer.name, f): torch.ones(1, 4, 4, device=layer.weight.device)
        for layer in kfac._layers
        for f in "AG"
    }
    losses = torch.ones(2, device=GPUS[1]).unbind()
    trial = Trial(model, damping)
    # All sums are made. Only then are the numbers read, which a fake tensor does not have.
    with pytest.raises(DataDependentOutputException):
        trial.finish(*losses, kfac._layers, factors, SingleProcess())


def test_a_thread_beside_training_needs_one_device(model):
    with pytest.raises(ValueError, match="layers are on cuda:0 and cuda:1: several ranks"):
        KFAC(model, sgd(model), background=True)
