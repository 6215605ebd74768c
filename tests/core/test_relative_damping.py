"""damping=None: the damping of a layer is the mean eigenvalue of its G kron A."""

import pytest
import torch
import torch.nn.functional as F

from kfac_bench.core.kernels import linalg
from tests.core.test_preconditioner import batch, kfac_of, layers_of, matrix_grad, tiny_model
from tests.support import oracle

METHODS = ("eigen", "inverse", "ekfac")


def step(method, loss_scale=1.0, **options):
    """Return by layer its recorded call, its gradient, and its preconditioned gradient."""
    model = tiny_model()
    recorder = oracle.Calls(layers_of(model))
    kfac = kfac_of(model, damping=None, method=method, **options)
    x, y = batch()
    (loss_scale * F.cross_entropy(model(x), y)).backward()
    raw = [matrix_grad(module).double() for module in recorder.calls]
    kfac.step()
    new = [matrix_grad(module).double() for module in recorder.calls]
    calls = [(module, *calls[0]) for module, calls in recorder.calls.items()]
    return list(zip(calls, raw, new, strict=True)), kfac


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_a_step_equals_the_dense_solve_with_the_mean_eigenvalue(method, factored):
    rows, _ = step(method, factored_damping=factored)
    for call, raw, new in rows:
        a, g = oracle.factors(*call)
        mean = (a.trace() / len(a) * g.trace() / len(g)).item()
        # The inverse splits a relative damping in any case: A gets its mean, and G gets its mean.
        splits = factored or method == "inverse"
        want = oracle.precondition(raw, a, g, mean, method, factored=splits)
        torch.testing.assert_close(new, want, rtol=2e-3, atol=1e-4 * want.abs().max().item())


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_of_another_scale_gives_the_same_direction(method):
    for (_, _, small), (_, _, large) in zip(step(method)[0], step(method, 3.0)[0], strict=True):
        torch.testing.assert_close(large * 3, small, rtol=1e-3, atol=1e-4 * small.abs().max())


def test_second_moments_get_their_mean():
    moments = torch.rand(2, 3, 4, dtype=torch.float64)
    got = linalg.damped_second_moments(moments, None)
    for layer, want in zip(got, moments, strict=True):
        torch.testing.assert_close(layer, want + want.sum() / 12)


@pytest.mark.parametrize("method", METHODS)
def test_factors_of_zeros_are_damped_by_1(method):
    model = tiny_model()
    kfac = kfac_of(model, damping=None, method=method)
    x, y = batch()
    (0.0 * F.cross_entropy(model(x), y)).backward()
    for module in layers_of(model):
        module.weight.grad.fill_(0.5)
    kfac.step()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_the_damping_of_the_next_step_is_none():
    _, kfac = step("eigen")
    assert kfac.damping is None
    assert kfac.fingerprint()["damping"] == "None"


@pytest.mark.parametrize("damping", [None, 0.03])
@pytest.mark.parametrize("options", [{"method": m} for m in METHODS] + [{"block_size": 8}])
def test_the_condition_is_that_of_the_damped_curvature(options, damping):
    model = tiny_model()
    kfac = kfac_of(model, **{"damping": damping, "method": "inverse"} | options)
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    assert kfac.conditions() == {}
    kfac.step()
    found, store = kfac.conditions(), kfac._executor.store
    assert list(found) == kfac.layer_names
    assert kfac.conditions() == {}  # no decomposition is new
    for layer in kfac._layers:
        spec = layer.spec
        dense = []
        for side in ("A", "G"):
            keys = [(spec.name, factor) for factor in spec.factors_of(side)]
            blocks = [store.factor(key)[0].double() for key in keys]
            dense.append(torch.block_diag(*blocks))
        a, g = dense
        means = a.trace() / len(a), g.trace() / len(g)
        if kfac.plan.method == "inverse":
            da, dg = means if damping is None else (damping, damping)
            values = torch.outer(eigenvalues(a) + da, eigenvalues(g) + dg)
        elif kfac.plan.method == "ekfac":
            moments = store.second_moments[spec.name].double()
            values = moments + (moments.mean() if damping is None else damping)
        else:
            values = torch.outer(eigenvalues(a), eigenvalues(g))
            values += means[0] * means[1] if damping is None else damping
        want = (values.max() / values.min()).item()
        assert found[spec.name] == pytest.approx(want, rel=0.05)


def test_without_an_inverse_there_is_no_condition():
    model = tiny_model()
    kfac = kfac_of(model, method="identity", damping=None, trust_ratio=1.0)
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    kfac.step()
    assert kfac.conditions() == {}


def eigenvalues(factor):
    return torch.linalg.eigvalsh(factor).clamp_min(0)
