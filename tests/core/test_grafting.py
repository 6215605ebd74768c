"""grafting=True: each layer's preconditioned gradient has the norm of its gradient.

In one process against the dense float64 oracle; on ranks against one process.
"""

import pytest
import torch

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
STRATEGIES = ("comm_opt", "mem_opt", "owner_reduce", "local_factors")


def step_beside_oracle(method, **options):
    """Return K-FAC and, by layer, the gradient before, after, and as the dense solution has it."""
    model = tiny_model()
    recorder = oracle.Recorder(layers_of(model))
    kfac = kfac_of(model, method=method, grafting=True, **options)
    backward(model, *batch())
    raw = {module: matrix_grad(module).double() for module in layers_of(model)}
    kfac.step()
    rows = []
    for module, (call,) in recorder.calls.items():
        a, g = oracle.factors(module, *call)
        solution = oracle.precondition(raw[module], a, g, DAMPING, method)
        want = solution * raw[module].norm() / solution.norm()
        rows.append((raw[module], matrix_grad(module).double(), want))
    return kfac, rows


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_the_direction_is_the_dense_solution_and_the_norm_is_the_gradients(method):
    _, rows = step_beside_oracle(method)
    for raw, got, want in rows:
        assert got.norm().item() == pytest.approx(raw.norm().item(), rel=1e-5)
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


def test_layers_with_a_zero_gradient_and_without_a_gradient():
    model = tiny_model()
    kfac = kfac_of(model, grafting=True)
    backward(model, *batch())
    model[5].weight.grad.zero_()
    model[5].bias.grad.zero_()
    model[0].weight.grad = model[0].bias.grad = None
    before = matrix_grad(model[7]).norm()
    kfac.step()
    assert matrix_grad(model[5]).count_nonzero() == 0
    assert model[0].weight.grad is None
    assert matrix_grad(model[7]).norm().item() == pytest.approx(before.item(), rel=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", quick_if(STRATEGIES[:2].__contains__, STRATEGIES))
def test_ranks_graft_as_one_process_does(strategy):
    train_on_ranks(2, model_of_ranks, batch_of_step, SMALL, strategy, GRAFTED)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", quick_if(STRATEGIES[1:2].__contains__, STRATEGIES))
def test_norms_of_sharded_gradients_are_those_of_whole_gradients(strategy):
    run_ranks(2, fsdp_on_rank, model_of_ranks, batch_of_step, strategy, GRAFTED)
