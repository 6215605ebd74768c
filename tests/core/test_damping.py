"""The adaptive damping: its rule by hand, and its quadratic model against dense matrices."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_bench.core.damping import LevenbergMarquardt
from tests.core.test_preconditioner import kfac_of, matrix_grad, sgd


@pytest.mark.parametrize(
    ("actual", "predicted", "value"),
    [
        (-0.8, -1.0, 0.25),
        (-0.7, -1.0, 1.0),
        (-0.3, -1.0, 1.0),
        (-0.2, -1.0, 4.0),
        (0.5, -1.0, 4.0),
        (-0.5, 1.0, 4.0),  # the model is not sound
        (math.nan, -1.0, 4.0),
        (0.0, 0.0, 1.0),  # a GradScaler skipped the step
    ],
)
def test_the_damping_follows_the_ratio_of_measured_and_predicted_change(actual, predicted, value):
    damping = LevenbergMarquardt(initial=1.0, interval=2, decay=0.5)
    damping.update(actual, predicted)
    assert damping.value == value


def test_the_damping_stays_within_its_limits():
    damping = LevenbergMarquardt(initial=1.0, interval=1, decay=0.5, least=0.75, most=2.0)
    for actual, value in ((-1.0, 0.75), (1.0, 1.5), (1.0, 2.0)):
        damping.update(actual, -1.0)
        assert damping.value == value


def test_a_long_interval_moves_the_damping_to_its_limits():
    damping = LevenbergMarquardt(interval=20_000)  # 0.95**20000 is 0 in floating point
    damping.update(1.0, -1.0)
    assert damping.value == damping.most
    damping.update(-1.0, -1.0)
    assert damping.value == damping.least


def test_a_damping_that_nobody_adapts_warns_once():
    model, damping = nn.Sequential(nn.Linear(3, 2)), LevenbergMarquardt(initial=0.1, interval=1)
    kfac = kfac_of(model, damping=damping)
    for _ in range(10):
        kfac.step()
    with pytest.warns(UserWarning, match=r"nobody has called adapt_damping\(\) after 10 steps"):
        kfac.step()
    kfac.step()


def test_two_kfacs_adapt_one_damping_apart():
    damping, kfacs = LevenbergMarquardt(initial=0.1, interval=1), []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(3, 2))
        kfacs.append(kfac_of(model, damping=damping))
        kfacs[-1].step()
        kfacs[-1].adapt_damping(torch.zeros(()), lambda: torch.ones(()))
    assert kfacs[0].damping == kfacs[1].damping == pytest.approx(0.1 / 0.95)
    assert damping.value == 0.1


def test_a_step_without_gradients_says_nothing_about_the_damping():
    model, damping = nn.Sequential(nn.Linear(3, 2)), LevenbergMarquardt(initial=0.1, interval=1)
    kfac = kfac_of(model, damping=damping)
    kfac.step()
    kfac.adapt_damping(torch.ones(()), lambda: torch.ones(()))
    assert kfac.damping == 0.1


@pytest.mark.parametrize("terms", [1, 4])
def test_the_predicted_change_is_that_of_the_dense_quadratic_model(terms):
    """It is grad^T delta + 1/2 delta^T (terms G kron A + damping I) delta."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(3, 2)), torch.randn(6, 3), torch.arange(6) % 2
    damping = LevenbergMarquardt(initial=0.1, interval=1, terms=terms)
    kfac = kfac_of(model, damping=damping)

    def loss():
        return F.cross_entropy(model(x), y)

    def weights():
        return torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach().double()

    before, old = loss(), weights()
    before.backward()
    gradient = matrix_grad(model[0]).double().flatten()
    kfac.step()
    sgd(model, lr=1 / terms).step()
    kfac.adapt_damping(before.detach(), loss)
    change, state = (weights() - old).flatten(), kfac.state_dict()["layers"]["0"]
    a, g = (state[factor]["factor"][0].double() for factor in "AG")
    curvature = terms * torch.kron(g, a) + 0.1 * torch.eye(8)
    predicted = gradient @ change + 0.5 * change @ curvature @ change
    measured = (loss() - before).item()
    assert kfac._schedules.damping.rho == pytest.approx(measured / predicted.item(), rel=1e-3)
