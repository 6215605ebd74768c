"""Losses on derivatives of the model: every use of a weight in a derivative leaves statistics."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.distributed import run_ranks
from tests.support.layer_checks import assert_close, assert_same, factors_of, grads_of, kfac_of

pytestmark = pytest.mark.usefixtures("double")

SAMPLES = 24


def network(inputs=3, outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(inputs, 8),
        nn.Tanh(),
        nn.Linear(8, 8, bias=False),
        nn.Tanh(),
        nn.Linear(8, outputs),
    )


def points(size=(SAMPLES, 3)):
    return torch.randn(size, generator=torch.Generator().manual_seed(1)).double()


def derivative(output, x):
    (made,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return made


def force(model, x):
    x = x.clone().requires_grad_()
    return derivative(model(x), x)


def force_and_value(model, x):
    x = x.clone().requires_grad_()
    output = model(x)
    return torch.cat([derivative(output, x), output], 1)


def laplacian(model, x):
    x = x.clone().requires_grad_()
    first = derivative(model(x), x)
    return sum(derivative(first[:, i], x)[:, i] for i in range(x.shape[1]))[:, None]


def score_matching(model, x):
    x = x.clone().requires_grad_()
    score = model(x)
    divergence = sum(derivative(score[:, i], x)[:, i] for i in range(x.shape[1]))
    return (divergence + score.square().sum(1) / 2)[:, None]


def gradient_norm(model, x):
    return force(model, x).flatten(1).norm(dim=1, keepdim=True)


def loss_of(outputs):
    return (outputs - 1).square().sum(1).mean() / 2


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Softplus(),
        nn.Conv2d(4, 4, 3, groups=2, bias=False), nn.Softplus(),
        nn.Flatten(), nn.Linear(16, 1),
    )  # fmt: skip


CASES = {
    "force": (network, force, (SAMPLES, 3)),
    "force and value": (network, force_and_value, (SAMPLES, 3)),
    "Laplacian": (network, laplacian, (SAMPLES, 3)),
    "score matching": (lambda: network(3, 3), score_matching, (SAMPLES, 3)),
    "positions": (network, lambda m, x: force(m, x).flatten(1), (SAMPLES, 5, 3)),
    "WGAN-GP": (convolutions, gradient_norm, (SAMPLES, 1, 8, 8)),
}


@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_sum_over_all_uses_is_the_gradient(case, options):
    make, outputs_of, size = CASES[case]
    model = make()
    kfac = kfac_of(model, **options)
    loss_of(outputs_of(model, points(size))).backward()
    results = dict(kfac._capture.identity.results)
    kfac.step()
    assert len(results) == sum(isinstance(m, nn.Linear | nn.Conv2d) for m in model)
    for total, gradient, rest, _ in results.values():
        assert rest < 1e-24 * gradient
        torch.testing.assert_close(total, gradient)


def dense_gauss_newton(model, layer, outputs_of, x):
    """The block of one layer, by one backward per output of each sample."""
    rows = []
    for output in outputs_of(model, x).flatten():
        grads = torch.autograd.grad(
            output,
            [*layer.parameters()],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        rows.append(torch.cat([g.view(len(layer.weight), -1) for g in grads], 1).flatten())
    jacobian = torch.stack(rows)
    return jacobian.T @ jacobian / len(x)


@pytest.mark.parametrize(
    ("outputs_of", "least"), [(force, 0.75), (force_and_value, 0.8), (laplacian, 0.75)]
)
def test_the_product_is_near_the_gauss_newton_matrix(outputs_of, least):
    """Without the uses in derivatives the cosine is 0.05 to 0.5 for forces and Laplacians."""
    model, x = network(), points()
    kfac = kfac_of(model, fisher="type2")
    outputs = outputs_of(model, x)
    kfac.fisher_backward(outputs, "gaussian")
    loss_of(outputs).backward()
    kfac.step()
    for name, f in factors_of(kfac).items():
        layer = model.get_submodule(name)
        got = torch.kron(f["G"].squeeze(0), f["A"].squeeze(0))
        want = dense_gauss_newton(model, layer, outputs_of, x)
        cosine = (got * want).sum() / (got.norm() * want.norm())
        assert cosine > least, (name, float(cosine))
        assert 0.4 < got.trace() / want.trace() < 2.5


def test_factors_of_a_force():
    """The uses of y = W x + b in E = w tanh(y) and in -dE/dx, from their definitions."""
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), points()
    kfac = kfac_of(model)
    loss_of(force(model, x)).backward()
    kfac.step()

    weight, last = model[0].weight.detach(), model[2].weight.detach()
    y = (x @ weight.T + model[0].bias).detach().requires_grad_()
    own = last * (1 - y.tanh().square())  # dE/dy
    made = (own @ weight).detach().requires_grad_()
    loss = loss_of(made)
    (v,) = torch.autograd.grad(loss, made)
    (g,) = torch.autograd.grad(own, y, v @ weight.T)
    a, v = torch.cat([x, torch.ones(SAMPLES, 1)], 1), torch.cat([v, torch.zeros(SAMPLES, 1)], 1)
    own = own.detach()
    norm_a, norm_g, norm_v, norm_own = (t.norm(dim=1, keepdim=True) for t in (a, g, v, own))
    s = norm_a / norm_v * (norm_v * norm_own / (norm_a * norm_g)).clamp_max(1).sqrt()
    rows_a, rows_g = torch.cat([a, s * v]), torch.cat([g, own / s])
    got = factors_of(kfac)["0"]
    assert_close(got["A"][0], rows_a.T @ rows_a / (2 * SAMPLES))
    assert_close(got["G"][0], SAMPLES * rows_g.T @ rows_g)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_scale_of_the_loss_is_in_g_alone(scale):
    results = []
    for factor in (1.0, scale):
        model = network()
        kfac = kfac_of(model)
        (factor * loss_of(force_and_value(model, points()))).backward()
        kfac.step()
        results.append(factors_of(kfac))
    for name, f in results[0].items():
        assert_close(results[1][name]["A"], f["A"])
        assert_close(results[1][name]["G"] / scale**2, f["G"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "ekfac"},
        {"weight_sharing": "reduce"},
        {"max_dim": 4},
        {"block_size": 4, "method": "ekfac", "weight_sharing": "reduce"},
        {"background": True},
    ],
    ids=str,
)
def test_micro_batches_equal_one_batch(options):
    results = []
    for parts in (1, 3):
        model = network()
        kfac = kfac_of(model, **options)
        for step in range(2):  # the first step makes the eigenvectors of ekfac
            model.zero_grad()
            for x in (points() + step).chunk(parts):
                (loss_of(laplacian(model, x)) / parts).backward()
            kfac.step()
        results.append(grads_of(model))
    assert_same(*results, 1e-6)


def on_a_rank(model, x):
    part = x.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else x
    kfac = kfac_of(model)
    loss_of(force_and_value(model, part)).backward()
    for p in model.parameters():
        if dist.is_initialized():
            dist.all_reduce(p.grad.div_(dist.get_world_size()))
    kfac.step()
    return {"f": factors_of(kfac), "g": grads_of(model)}


@pytest.mark.ranks
def test_two_ranks_equal_one_process():
    model, x = network().float(), points().float()
    results = run_ranks(2, on_a_rank, model, x)
    want = on_a_rank(model, x)
    for result in results:
        assert_same(result, want, 1e-5)


def test_what_no_hook_sees_is_named():
    """MAML: the derivative of a step of gradient descent with respect to its start."""
    model = network(3, 3)
    kfac = kfac_of(model)
    x = points()
    inner = loss_of(model(x))
    names, weights = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(inner, weights, create_graph=True)
    moved = {n: w - 0.1 * g for n, w, g in zip(names, weights, grads, strict=True)}
    loss_of(torch.func.functional_call(model, moved, (x + 1,))).backward()
    with pytest.warns(UserWarning, match=r"layer '0' .*differ by .*layers: 3\).*Add it to skip"):
        kfac.step()


def test_a_first_backward_that_frees_its_graph():
    results = []
    for retain_graph in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        kfac = kfac_of(model)
        x = points().requires_grad_()
        (made,) = torch.autograd.grad(
            model(x).sum(), x, create_graph=True, retain_graph=retain_graph
        )
        loss_of(made).backward()
        kfac.step()
        results.append({"f": factors_of(kfac), "g": grads_of(model)})
    assert_same(*results)


def test_an_inner_gradient_that_the_loss_does_not_use_changes_nothing():
    results = []
    for has_inner in (False, True):
        model = network()
        x = points().requires_grad_()
        kfac = kfac_of(model)
        output = model(x)
        if has_inner:
            derivative(output, x)
        loss_of(output).backward()
        kfac.step()
        results.append({"f": factors_of(kfac), "g": grads_of(model)})
    assert_same(*results)


def test_a_weight_of_inputs_times_outputs():
    """Conv1D of transformers has the transposed weight of a linear layer."""
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    results = []
    for is_transposed in (False, True):
        model = network()
        if is_transposed:
            conv = Conv1D(8, 3)
            conv.weight.data = model[0].weight.detach().T.clone()
            conv.bias.data = model[0].bias.detach().clone()
            model[0] = conv
        kfac = kfac_of(model)
        loss_of(force(model, points())).backward()
        kfac.step()
        gradient = model[0].weight.grad
        results.append((factors_of(kfac), gradient.T if is_transposed else gradient))
    assert_same(results[1][0], results[0][0])
    assert_close(results[1][1], results[0][1])
