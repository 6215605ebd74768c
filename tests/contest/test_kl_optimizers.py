"""KL-Shampoo and KL-SOAP against dense float64 oracles that follow the paper's equations."""

import pytest
import torch
from torch import nn

from benchmarks.contest.kl_optimizers import KLSOAP, KLShampoo
from benchmarks.contest.setup import OPTIMIZERS
from kfac_bench.config import compose
from kfac_bench.errors import UsageError
from tests.training.test_optimizers import learns_and_goes_on

BETAS = (0.8, 0.9)


def gradients(shape, steps, seed=0):
    """Gradients with unequal directions, so that bases and eigenvalues matter.

    A square shape leaves no choice of eigenvectors: other first factors have equal eigenvalues.
    """
    g = torch.Generator().manual_seed(seed)
    first = torch.randn(shape, generator=g, dtype=torch.float64)
    sizes = torch.logspace(-1, 1, shape[0], dtype=torch.float64).view(-1, *[1] * (len(shape) - 1))
    return [
        sizes * (first + torch.randn(shape, generator=g, dtype=torch.float64)) for _ in range(steps)
    ]


def trained(make, grads, **settings):
    """The weight after one step with each gradient; it starts at ones."""
    weight = nn.Parameter(torch.ones_like(grads[0]))
    optimizer = make([weight], betas=BETAS, **settings)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()


def power(matrix, exponent):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values**exponent) @ vectors.mT


def moments(grads, nesterov):
    """Adam's first moment after each gradient, with its bias corrected, or Nesterov's."""
    m, result = torch.zeros_like(grads[0]), []
    for t, grad in enumerate(grads, 1):
        m = BETAS[0] * m + (1 - BETAS[0]) * grad
        corrected = m / (1 - BETAS[0] ** t)
        look_ahead = BETAS[0] * corrected + (1 - BETAS[0]) * grad
        result.append(look_ahead if nesterov else corrected)
    return result


def factor_decays(steps, correct_bias):
    """The weight of the old factors at each step."""
    return [min(BETAS[1], t / (t + 1)) if correct_bias else BETAS[1] for t in range(1, steps + 1)]


def dense_factors(grads, diagonal, correct_bias):
    """S_a and S_b after each gradient, from the definition, with dense inverses."""
    rows, columns = grads[0].shape
    start = grads[0].square().mean().sqrt()
    a, b = (start * torch.eye(n, dtype=torch.float64) for n in (rows, columns))
    result = []
    for grad, beta in zip(grads, factor_decays(len(grads), correct_bias), strict=True):
        new_a = beta * a + (1 - beta) / columns * grad @ torch.linalg.inv(b) @ grad.mT
        new_b = beta * b + (1 - beta) / rows * grad.mT @ torch.linalg.inv(a) @ grad
        a, b = (
            s.diagonal().diag() if d else s for s, d in zip((new_a, new_b), diagonal, strict=True)
        )
        result.append((a, b))
    return result


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("correct_bias", [False, True])
@pytest.mark.parametrize("diagonal", [(False, False), (False, True)])
def test_kl_shampoo_with_exact_bases_is_the_root_of_the_kronecker_product(
    nesterov, correct_bias, diagonal
):
    """vec(W) changes by (S_a kron S_b)^(-1/2) vec(M); a side above max_dim is diagonal."""
    grads = gradients((4, 6), 5)
    settings = {"lr": 0.1, "weight_decay": 0.2, "eps": 1e-30, "nesterov": nesterov}
    settings |= {"precondition_freq": 1, "exact": True, "correct_bias": correct_bias}
    settings["max_dim"] = 5 if diagonal[1] else 10
    found = trained(KLShampoo, grads, **settings)
    weight = torch.ones(4, 6, dtype=torch.float64)
    factors = dense_factors(grads, diagonal, correct_bias)
    for (a, b), moment in zip(factors, moments(grads, nesterov), strict=True):
        update = power(torch.kron(a, b), -0.5) @ moment.flatten()
        weight = weight - 0.1 * 0.2 * weight - 0.1 * update.view(4, 6)
    torch.testing.assert_close(found, weight)


def with_stale_bases(grads, freq, direction, exact):
    """The oracle of both methods with bases of some steps ago; factors in the standard basis.

    ``direction`` maps the moment, the gradient and v, all in the eigenbases, the eigenvalues and
    the step to the update in the eigenbases; it changes v in place.
    """
    start = grads[0].square().mean().sqrt()
    factors = [start * torch.eye(n, dtype=torch.float64) for n in grads[0].shape]
    bases = [torch.eye(n, dtype=torch.float64) for n in grads[0].shape]
    weight, v = torch.ones_like(grads[0]), torch.zeros_like(grads[0])
    decays = factor_decays(len(grads), correct_bias=True)
    for t, (grad, moment) in enumerate(zip(grads, moments(grads, False), strict=True), 1):
        values = [(q.mT @ s @ q).diagonal() for q, s in zip(bases, factors, strict=True)]
        inverse = [q @ (1 / x).diag() @ q.mT for q, x in zip(bases, values, strict=True)]
        sides = (grad @ inverse[1] @ grad.mT, grad.mT @ inverse[0] @ grad)
        for i, side in enumerate(sides):
            share = (1 - decays[t - 1]) / grad.shape[1 - i]
            factors[i] = decays[t - 1] * factors[i] + share * side
        if t == 1 or t % freq == 0:
            for i, (q, s) in enumerate(zip(bases, factors, strict=True)):
                order = (q.mT @ s @ q).diagonal().argsort(descending=True)
                v = v.index_select(i, order) if t > 1 else v
                if t == 1 or exact:
                    bases[i] = torch.linalg.eigh(s).eigenvectors.flip(1)
                else:
                    bases[i] = torch.linalg.qr(s @ q[:, order]).Q
        values = [(q.mT @ s @ q).diagonal() for q, s in zip(bases, factors, strict=True)]
        rotated = [bases[0].mT @ x @ bases[1] for x in (moment, grad)]
        weight = weight - 0.1 * bases[0] @ direction(*rotated, v, values, t) @ bases[1].mT
    return weight


def whitened(moment, grad, v, values, t):
    return moment / torch.outer(*values).sqrt()


def adams(moment, grad, v, values, t):
    """Adam, after a first step that is KL-Shampoo's."""
    v.mul_(BETAS[1]).add_((1 - BETAS[1]) * grad.square())
    if t == 1:
        return whitened(moment, grad, v, values, t)
    return moment / (v / (1 - BETAS[1] ** t)).sqrt()


@pytest.mark.parametrize(("make", "direction"), [(KLShampoo, whitened), (KLSOAP, adams)])
@pytest.mark.parametrize(("freq", "exact"), [(3, False), (3, True), (100, False)])
def test_eigenvalues_are_running_averages_in_a_stale_basis(make, direction, freq, exact):
    grads = gradients((4, 4), 15)
    found = trained(make, grads, lr=0.1, eps=1e-30, precondition_freq=freq, exact=exact)
    torch.testing.assert_close(found, with_stale_bases(grads, freq, direction, exact))


@pytest.mark.parametrize("make", [KLShampoo, KLSOAP])
def test_a_convolution_is_a_matrix(make):
    grads = gradients((4, 2, 3, 3), 4)
    found = trained(make, grads, precondition_freq=2)
    matrix = trained(make, [g.reshape(4, 18) for g in grads], precondition_freq=2)
    torch.testing.assert_close(found, matrix.view(4, 2, 3, 3))


@pytest.mark.parametrize("make", [KLShampoo, KLSOAP])
def test_vectors_are_updated_by_adamw(make):
    grads = gradients((7,), 4)
    settings = {"lr": 0.1, "weight_decay": 0.2}
    found = trained(make, grads, **settings)
    torch.testing.assert_close(found, trained(torch.optim.AdamW, grads, **settings))


@pytest.mark.parametrize("make", [KLShampoo, KLSOAP])
def test_the_size_of_the_loss_and_steps_without_gradient_do_not_matter(make):
    """Also after a first gradient of zeros, as behind a layer that starts at zero."""
    grads = gradients((4, 4), 6)
    found = trained(make, grads, eps=1e-30)
    torch.testing.assert_close(found, trained(make, [1e4 * g for g in grads], eps=1e-30))
    still = trained(make, [torch.zeros_like(grads[0])])
    assert still.equal(torch.ones_like(still))
    after = trained(make, [torch.zeros_like(grads[0]), grads[0]])
    assert after.isfinite().all()
    assert (after - 1).abs().amax() > 1e-4


def test_a_unit_that_was_dead_does_not_blow_up_the_other_factor():
    alive = gradients((5, 3), 301, seed=1)
    dead = [g.clone() for g in alive]
    for g in dead[:300]:
        g[2] = 0
    weights = [trained(KLShampoo, grads, lr=1.0) for grads in (dead[:300], dead)]
    change = weights[1] - weights[0]
    assert change.isfinite().all()
    assert 0.01 < change[[0, 1, 3, 4]].abs().amax() < 10


def test_settings_of_groups_and_a_closure():
    first, second = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    optimizer = KLSOAP([{"params": [first], "lr": 0.0}, {"params": [second]}], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = first.square().sum() + second.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 12
    assert first.equal(torch.ones(3, 2))
    assert second.sum() < 6


@pytest.mark.parametrize("make", [KLShampoo, KLSOAP])
def test_a_weight_without_elements_is_left_alone(make):
    weight = nn.Parameter(torch.empty(3, 0))
    weight.grad = torch.empty(3, 0)
    make([weight]).step()


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="KLShampoo cannot update weights with sparse"):
        KLShampoo(table.parameters()).step()


@pytest.mark.parametrize("make", [KLShampoo, KLSOAP])
def test_weights_in_half_precision_have_a_float32_state_also_when_it_is_loaded(make):
    grads = [g.bfloat16() for shape in ((4, 6), (5,)) for g in gradients(shape, 4)]
    weights = [nn.Parameter(torch.zeros_like(g)) for g in (grads[0], grads[4])]
    exact = [nn.Parameter(torch.zeros_like(w, dtype=torch.float32)) for w in weights]
    settings = {"lr": 2.0**-6, "precondition_freq": 2}
    half, single = make(weights, **settings), make(exact, **settings)
    for step in range(4):
        for w, e, grad in zip(weights, exact, (grads[step], grads[4 + step]), strict=True):
            w.grad, e.grad = grad, grad.float()
        half.step()
        single.step()
        loaded = make(weights, **settings)
        loaded.load_state_dict(half.state_dict())
        half = loaded
    for w, e in zip(weights, exact, strict=True):
        torch.testing.assert_close(w.float(), e, rtol=0.02, atol=1e-3)
        for name, value in half.state[w].items():
            torch.testing.assert_close(value, single.state[e][name], rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_learns_and_goes_on_where_it_stopped(tmp_path, name):
    learns_and_goes_on(tmp_path, name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_does_not_fit_sharded_weights(name):
    with pytest.raises(UsageError, match=f"optimizer={name} does not fit backend=fsdp2"):
        compose.load([f"optimizer={name}", "backend=fsdp2"])
