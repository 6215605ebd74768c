"""grafting=True: the part of each preconditioned gradient along the gradient is the gradient.

In one process against the dense float64 oracle; on ranks against one process.
"""

import pytest
import torch

from kfac_bench.core import KFAC
from kfac_bench.core.kernels import linalg
from kfac_bench.core.kernels.linalg import MOST_ACROSS, MOST_ACROSS_ELEMENTWISE
from tests.core.distributed.test_sharded import fsdp_on_rank
from tests.core.test_preconditioner import (
    DAMPING,
    backward,
    batch,
    kfac_of,
    layers_of,
    matrix_grad,
    tiny_model,
)
from tests.core.test_strategies import SMALL, train_on_ranks
from tests.support import oracle
from tests.support.distributed import run_ranks
from tests.support.quick import quick_if
from tests.support.training import batch as batch_of_step
from tests.support.training import tiny_model as model_of_ranks

GRAFTED = {"grafting": True, "kl_clip": 1e-5}
BOTH_LIMITS = {"grafting": True, "kl_clip": 1e-2, "trust_ratio": 1e-3}
STRATEGIES = ("comm_opt", "mem_opt", "owner_reduce", "local_factors")


def grafted(solution, gradient, most_across):
    """The gradient, and what the scaled solution has across it, of limited length."""
    scaled = solution * gradient.square().sum() / (solution * gradient).sum()
    across = scaled - gradient
    return gradient + across * min(1.0, most_across * gradient.norm() / across.norm())


def step_beside_oracle(method, **options):
    """Return K-FAC and, by layer, the gradient before, after, and as the dense solution has it."""
    model = tiny_model()
    recorder = oracle.Calls(layers_of(model))
    kfac = kfac_of(model, method=method, grafting=True, **options)
    backward(model, *batch())
    raw = {module: matrix_grad(module).double() for module in layers_of(model)}
    kfac.step()
    rows = []
    for module, (call,) in recorder.calls.items():
        a, g = oracle.factors(module, *call)
        solution = oracle.precondition(raw[module], a, g, DAMPING, method)
        want = grafted(solution, raw[module], MOST_ACROSS)
        rows.append((raw[module], matrix_grad(module).double(), want))
    return kfac, rows


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
def test_gradients_whose_squares_are_zero_in_float32_stay_finite(method):
    """As in the first layers of a deep network: a relative damping of them has no inverse."""
    model = tiny_model()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), method=method)
    x, y = batch()
    (1e-20 * torch.nn.functional.cross_entropy(model(x), y)).backward()
    before = [p.grad.clone() for p in model.parameters()]
    kfac.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.grad.isfinite().all()
        assert 0 < p.grad.norm() <= 4 * old.norm()


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_the_direction_is_the_dense_solution_and_its_part_along_the_gradient_is_the_gradient(
    method,
):
    _, rows = step_beside_oracle(method)
    for raw, got, want in rows:
        part = (got * raw).sum() / raw.norm()
        assert part.item() == pytest.approx(raw.norm().item(), rel=1e-4)
        torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-5)
        assert not torch.allclose(got, raw, rtol=0.1)


def test_the_kl_clip_judges_the_grafted_gradients():
    lr, kl_clip = 0.1, 1e-4
    kfac, rows = step_beside_oracle("eigen", kl_clip=kl_clip)
    total = sum((want * raw).sum().abs() for raw, _, want in rows) * lr**2
    nu = (kl_clip / total.item()) ** 0.5
    assert nu < 0.9
    assert kfac.statistics()["nu"] == pytest.approx(nu, rel=1e-4)
    for _, got, want in rows:
        torch.testing.assert_close(got, nu * want, rtol=2e-3, atol=1e-6)


def size_of(module):
    """The norm of weight and bias, but at least the square root of the number of rows."""
    params = [p.detach().flatten() for p in (module.weight, module.bias) if p is not None]
    return max(torch.cat(params).norm().item(), len(module.weight) ** 0.5)


@pytest.mark.parametrize("kl_clip", [None, 1.0])
def test_the_trust_ratio_limits_the_step_of_each_layer_to_a_share_of_its_weights(kl_clip):
    lr, trust_ratio = 0.1, 1e-2
    kfac, rows = step_beside_oracle("inverse", trust_ratio=trust_ratio, kl_clip=kl_clip)
    longest = [trust_ratio * size_of(module) for module in layers_of(tiny_model())]
    steps = [lr * want.norm().item() for _, _, want in rows]
    scales = [min(1.0, a / b) for a, b in zip(longest, steps, strict=True)]
    assert min(scales) < 0.5
    assert max(scales) > 2 * min(scales)
    shrunk = sum((a * b) ** 2 for a, b in zip(scales, steps, strict=True))
    nu = (shrunk / sum(b**2 for b in steps)) ** 0.5
    assert kfac.statistics()["nu"] == pytest.approx(nu, rel=1e-4)
    for scale, (_, got, want) in zip(scales, rows, strict=True):
        torch.testing.assert_close(got, scale * want, rtol=2e-3, atol=1e-6)


def test_the_norm_of_weights_in_float16_does_not_overflow():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).half()
    torch.nn.init.constant_(model[0].weight, 30.0)
    kfac = kfac_of(model, skip=[])
    model[0].weight.grad = torch.ones_like(model[0].weight)
    gradients = kfac._executor.gradients
    gradients.begin()
    assert gradients.weight_squares().tolist() == pytest.approx([64 * 64 * 900], rel=1e-3)


def test_the_kl_clip_judges_what_the_trust_ratio_leaves():
    lr, kl_clip = 0.1, 1e-4
    _, rows = step_beside_oracle("eigen", trust_ratio=1e-2)
    change = lr**2 * sum((raw * got).sum().abs().item() for raw, got, _ in rows)
    clip = (kl_clip / change) ** 0.5
    assert clip < 0.9
    _, both = step_beside_oracle("eigen", trust_ratio=1e-2, kl_clip=kl_clip)
    for (_, limited, _), (_, got, _) in zip(rows, both, strict=True):
        torch.testing.assert_close(got, clip * limited, rtol=1e-4, atol=1e-7)


def test_a_step_within_the_trust_ratio_stays_as_it_is():
    kfac, rows = step_beside_oracle("inverse", trust_ratio=100.0)
    assert kfac.statistics()["nu"] == 1.0
    assert torch.allclose(rows[0][1], rows[0][2], rtol=2e-3, atol=1e-5)
    assert linalg.trust_scale(torch.zeros(()), torch.ones(()), 0.01) == 1.0


@pytest.mark.parametrize(("value", "nu"), [(0.0, 1.0), (float("nan"), float("nan"))])
def test_nu_of_a_step_of_zeros_is_1_and_nan_stays_visible(value, nu):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    kfac = kfac_of(model, trust_ratio=1e-3, grafting=True)
    model(torch.randn(8, 4)).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad.fill_(value)
    kfac.step()
    assert kfac.statistics()["nu"] == pytest.approx(nu, nan_ok=True)


def test_a_layer_of_zeros_may_move():
    """Its norm is 0, but the limit counts its rows."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    kfac = kfac_of(model, trust_ratio=1e-3, grafting=True)
    model(torch.randn(8, 4)).sum().backward()
    model[0].weight.grad, model[0].bias.grad = torch.full((3, 4), 1e3), torch.full((3,), 1e3)
    kfac.step()
    step = torch.cat([model[0].weight.grad.flatten(), model[0].bias.grad]).norm() * 0.1
    assert step.item() == pytest.approx(1e-3 * 3**0.5, rel=1e-4)


def test_the_part_across_the_gradient_has_a_limit():
    one = torch.ones(3)
    p, g = linalg.graft(torch.tensor([0.6, 0.1, 0.0]), one, one, 3.0)
    # Cosines of 0.6 and 0.1 are parts of 4/3 and 9.95 across; a cosine of 0 says nothing.
    assert p.tolist() == pytest.approx([1 / 0.6, 10 * 3 / 99**0.5, 0.0])
    assert g.tolist() == pytest.approx([0.0, 1 - 3 / 99**0.5, 1.0], abs=1e-6)
    zero = torch.zeros(())
    assert [x.item() for x in linalg.graft(zero, zero, zero, 3.0)] == [0.0, 1.0]


OPTIMIZERS = {
    "adamw": (lambda p: torch.optim.AdamW(p, 0.01), MOST_ACROSS_ELEMENTWISE),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, 0.01), MOST_ACROSS_ELEMENTWISE),
    "adagrad": (lambda p: torch.optim.Adagrad(p, 0.01), MOST_ACROSS_ELEMENTWISE),
    "rprop": (lambda p: torch.optim.Rprop(p, 0.01), MOST_ACROSS_ELEMENTWISE),
    "asgd": (lambda p: torch.optim.ASGD(p, 0.01), MOST_ACROSS),
    "sam": (lambda p: torch.optim.SGD([{"params": [*p], "rho": 0.05}], 0.01), MOST_ACROSS),
    "adadelta": (lambda p: torch.optim.Adadelta(p, 0.01), MOST_ACROSS_ELEMENTWISE),
    "sgd": (lambda p: torch.optim.SGD(p, 0.01, momentum=0.9), MOST_ACROSS),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_before_adam_the_part_across_is_shorter(name):
    make, most = OPTIMIZERS[name]
    model = tiny_model()
    kfac = KFAC(model, make(model.parameters()), damping=1e-4, trust_ratio=None)
    backward(model, *batch())
    raw = {module: matrix_grad(module).clone() for module in layers_of(model)}
    kfac.step()
    longest = 0.0
    for module, gradient in raw.items():
        across = matrix_grad(module) - gradient
        assert (across * gradient).sum().item() == pytest.approx(
            0, abs=1e-4 * gradient.square().sum().item() + 1e-9
        )
        longest = max(longest, (across.norm() / gradient.norm()).item())
    assert longest == pytest.approx(most, rel=1e-3)


def test_the_rate_of_a_layer_is_that_of_its_group_after_a_group_was_removed():
    model = tiny_model()
    groups = [{"params": [*m.parameters()], "lr": i} for i, m in enumerate(layers_of(model), 1)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    kfac = KFAC(model, optimizer, skip=["^0$"])
    before = kfac._write_back.learning_rates()
    optimizer.param_groups.pop(0)
    assert kfac._write_back.learning_rates() == before == {"2": 2, "5": 3, "7": 4}


def test_layers_with_a_zero_gradient_and_without_a_gradient():
    model = tiny_model()
    kfac = kfac_of(model, grafting=True)
    backward(model, *batch())
    model[5].weight.grad.zero_()
    model[5].bias.grad.zero_()
    model[0].weight.grad = model[0].bias.grad = None
    before = matrix_grad(model[7]).clone()
    kfac.step()
    assert matrix_grad(model[5]).count_nonzero() == 0
    assert model[0].weight.grad is None
    part = (matrix_grad(model[7]) * before).sum()
    assert part.item() == pytest.approx(before.square().sum().item(), rel=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", quick_if(STRATEGIES[:2].__contains__, STRATEGIES))
def test_ranks_graft_as_one_process_does(strategy):
    train_on_ranks(2, model_of_ranks, batch_of_step, SMALL, strategy, GRAFTED)


@pytest.mark.ranks
@pytest.mark.parametrize("options", [GRAFTED, BOTH_LIMITS])
@pytest.mark.parametrize("strategy", quick_if(STRATEGIES[1:2].__contains__, STRATEGIES))
def test_norms_of_sharded_gradients_are_those_of_whole_gradients(strategy, options):
    run_ranks(2, fsdp_on_rank, model_of_ranks, batch_of_step, strategy, options)
