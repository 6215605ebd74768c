"""EKFAC (George et al. 2018) against its definition, from gradients of each sample by autograd."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_bench.core.layers import base as layer_module
from tests.support import layer_checks, oracle
from tests.support.layer_checks import DAMPING, assert_close

pytestmark = pytest.mark.usefixtures("double")
N = 6
OPTIONS = {"method": "ekfac", "update_freq": 100, "early_updates": False}


def kfac_of(model, **options):
    return layer_checks.kfac_of(model, **(OPTIONS | options))


def loss_of(output):
    """A mean over samples."""
    return (output.square() + output.tanh()).sum() / len(output)


def step(model, kfac, x):
    """Gradients before and after, by layer, [groups, g_dim, a_dim]."""
    model.zero_grad()
    loss_of(model(x)).backward()
    raw = {n: oracle.layer_gradient(m) for n, m in covered(model).items()}
    kfac.step()
    return raw, {n: oracle.layer_gradient(m) for n, m in covered(model).items()}


def covered(model):
    kinds = nn.Linear | nn.Conv2d | nn.ConvTranspose2d
    return {n: m for n, m in model.named_modules() if isinstance(m, kinds)}


def sample_gradients(model, x):
    """By layer: the gradient of each sample's own loss, [N, groups, g_dim, a_dim]."""
    model, each = copy.deepcopy(model), []
    for one in x:
        model.zero_grad()
        loss_of(model(one[None])).backward()
        each.append({n: oracle.layer_gradient(m) for n, m in covered(model).items()})
    return {n: torch.stack([grads[n] for grads in each]) for n in each[0]}


def eigenbasis(kfac, name):
    """(eigenvalues, eigenvectors) of A and G."""
    entry = kfac.state_dict()["layers"][name]
    return entry["A"]["eigen"], entry["G"]["eigen"]


def dense_second_moment(kfac, name, grads):
    """Mean over samples of (Q_G^T grad Q_A)^2."""
    (_, qa), (_, qg) = eigenbasis(kfac, name)
    return (qg.mT @ grads @ qa).square().mean(0)


def second_moment(kfac, name):
    return kfac.state_dict()["layers"][name]["second_moment"].clone()


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(self.body(x).tanh()).tanh())


def tokens():
    """One output per sample, by attention over positions: positions mix."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.v, self.head = nn.Linear(4, 4), nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            q = self.q(x)
            return self.head(((q @ q.mT).softmax(-1) @ self.v(x)).mean(1))

    return Tokens()


def convnet():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, groups=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def decoder():
    return nn.Sequential(
        nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1),
        nn.Tanh(),
        nn.ConvTranspose2d(4, 6, 2, groups=2, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def dead_units():
    body = nn.Linear(4, 6)
    with torch.no_grad():
        body.bias[[1, 4]] = -100.0
    return nn.Sequential(body, nn.ReLU(), nn.Linear(6, 3))


CASES = {
    "dead units": (dead_units, (N, 4)),
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (N, 4)),
    "positions": (tokens, (N, 3, 4)),
    "convolutions": (convnet, (N, 2, 6, 6)),
    "transposed convolutions": (decoder, (N, 2, 3, 3)),
    "called twice": (Twice, (N, 4)),
    "called twice, positions": (Twice, (N, 3, 4)),
}
cases = pytest.mark.parametrize("case", [c for c in CASES if "twice" not in c])


@pytest.mark.parametrize("numel", [1 << 22, 1])
@cases
def test_second_moments_equal_the_definition(case, numel, monkeypatch):
    """With factor_decay=0 they are the last step's alone; numel: all samples at once, or one."""
    monkeypatch.setattr(layer_module, "SECOND_MOMENT_NUMEL", numel)
    make, shape = CASES[case]
    model, (x, y) = make(), torch.randn(2, *shape)
    kfac = kfac_of(model, factor_decay=0)
    step(model, kfac, x)  # makes the eigenbasis
    step(model, kfac, y)
    for name, grads in sample_gradients(model, y).items():
        want = dense_second_moment(kfac, name, grads)
        assert_close(second_moment(kfac, name), want)


@pytest.mark.parametrize("case", ["called twice", "called twice, positions"])
def test_second_moments_of_a_layer_called_twice(case):
    """A sample's gradient is the sum over its calls: so it is squared."""
    make, shape = CASES[case]
    model, (x, y) = make(), torch.randn(2, *shape)
    kfac = kfac_of(model, factor_decay=0)
    step(model, kfac, x)
    step(model, kfac, y)
    for name, grads in sample_gradients(model, y).items():
        assert_close(second_moment(kfac, name), dense_second_moment(kfac, name, grads))


@cases
def test_the_preconditioned_gradient_equals_the_dense_formula(case):
    make, shape = CASES[case]
    model, (x, y) = make(), torch.randn(2, *shape)
    kfac = kfac_of(model, factor_decay=0)
    step(model, kfac, x)
    raw, new = step(model, kfac, y)
    for name, grads in sample_gradients(model, y).items():
        (_, qa), (_, qg) = eigenbasis(kfac, name)
        for group, grad in enumerate(raw[name]):
            basis = torch.kron(qg[group], qa[group])  # of the row-major vec
            moments = (grads[:, group].flatten(1) @ basis).square().mean(0)
            curvature = basis @ torch.diag(moments + DAMPING) @ basis.T
            want = torch.linalg.solve(curvature, grad.flatten()).view_as(grad)
            assert_close(new[name][group], want)
            assert not torch.allclose(new[name][group], grad, rtol=0.1)


def carried(moments, old, new):
    """The diagonal of a matrix in the basis ``new``; ``moments`` are its diagonal in ``old``."""
    (qa, qg), (pa, pg) = old, new
    before, after = torch.kron(qg[0], qa[0]), torch.kron(pg[0], pa[0])
    matrix = before @ torch.diag(moments.flatten()) @ before.T
    return (after.T @ matrix @ after).diagonal().view_as(moments)


@pytest.mark.slow
@pytest.mark.parametrize(("update_freq", "block_size"), [(1, None), (5, 3)])
def test_200_steps_equal_a_dense_ekfac(update_freq, block_size):
    """Debiased averages of measured moments, carried from one eigenbasis into the next."""
    model, decay = CASES["mlp"][0](), 0.9
    kfac = kfac_of(
        model, factor_decay=decay, update_freq=update_freq, spread=False, block_size=block_size
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    state, drift = {}, torch.randn(4)
    for number in range(200):
        x = torch.randn(N, 4) * (1 + 0.5 * torch.sin(drift * number / 20))
        grads = sample_gradients(model, x)
        raw, new = step(model, kfac, x)
        for name in covered(model):
            a, g = (whole_eigen(kfac, name, side) for side in "AG")
            basis, product = (a[1], g[1]), g[0].unsqueeze(-1) * a[0].unsqueeze(-2)
            moments, weight, old = state.get(name, (product, 0.0, basis))
            if number:
                weight = decay * weight + 1
                fresh = (old[1].mT @ grads[name] @ old[0]).square().mean(0)
                moments = moments + (fresh - moments) / weight
            moments = carried(moments, old, basis) if weight else product
            state[name] = moments, weight, basis
            assert_close(second_moment(kfac, name), moments)
            rotated = g[1].mT @ raw[name] @ a[1] / (moments + DAMPING)
            assert_close(new[name], g[1] @ rotated @ a[1].mT)
        optimizer.step()
    if not block_size:
        # What counts is measured: the products of eigenvalues are another diagonal.
        assert not torch.allclose(moments, product, rtol=0.3)


def whole_eigen(kfac, name, side):
    """Eigenvalues and eigenvectors of A or G, also of one that is divided into blocks."""
    entries = kfac.state_dict()["layers"][name]
    blocks = [entries[k]["eigen"] for k in entries if k.partition(".")[0] == side]
    values = torch.cat([block[0] for block in blocks], -1)
    return values, torch.block_diag(*(block[1][0] for block in blocks)).unsqueeze(0)


def test_a_state_of_an_older_version_without_weights_is_taken_over():
    model, x = CASES["mlp"][0](), torch.randn(N, 4)
    kfac = kfac_of(model)
    step(model, kfac, x)
    step(model, kfac, x)
    state = copy.deepcopy(kfac.state_dict())
    for entries in state["layers"].values():
        del entries["second_moment_weight"]
    kfac.load_state_dict(state)
    for name, entries in state["layers"].items():
        assert_close(second_moment(kfac, name), entries["second_moment"])


def test_the_first_step_of_ekfac_equals_kfac():
    results = []
    for method in ("eigen", "ekfac"):
        torch.manual_seed(0)
        model = CASES["positions"][0]()
        results.append(step(model, kfac_of(model, method=method), torch.randn(N, 3, 4))[1])
    for name, want in results[0].items():
        assert_close(results[1][name], want)


def test_layers_with_a_diagonal_factor_use_kfac_instead_of_ekfac():
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 9)), torch.randn(N, 4)
    kfac = kfac_of(model, max_dim=8)
    for _ in range(2):
        step(model, kfac, x)
    layers = kfac.state_dict()["layers"]
    assert "second_moment" in layers["0"]
    assert "second_moment" not in layers["2"]


@pytest.mark.parametrize("data", ["classes", "squared error"])
def test_the_diagonal_is_at_least_as_close_to_the_fisher_as_that_of_kfac(data):
    """Frobenius distance to each layer's exact block: least of all diagonals in that basis."""
    torch.manual_seed(4)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(40, 4)
    y = torch.randint(3, (40,)) if data == "classes" else torch.randn(40, 3)

    def loss(output, target):
        if data == "classes":
            return F.cross_entropy(output, target)
        return (output - target).square().sum(1).mean()

    kfac = kfac_of(model, factor_decay=0)
    for _ in range(2):
        model.zero_grad()
        loss(model(x), y).backward()
        kfac.step()
    each = []
    for one, target in zip(x, y, strict=True):
        model.zero_grad()
        loss(model(one[None]), target[None]).backward()
        each.append({n: oracle.layer_gradient(m)[0].flatten() for n, m in covered(model).items()})
    for name in covered(model):
        grads = torch.stack([e[name] for e in each])
        fisher = grads.T @ grads / len(grads)
        (a, qa), (g, qg) = (tuple(t[0] for t in pair) for pair in eigenbasis(kfac, name))
        basis = torch.kron(qg, qa)

        def distance(values, basis=basis, fisher=fisher):
            return float((basis @ torch.diag(values.flatten()) @ basis.T - fisher).norm())

        ekfac = distance(second_moment(kfac, name)[0])
        assert ekfac < 0.99 * distance(torch.outer(g, a)), name
        assert ekfac == pytest.approx(distance((basis.T @ fisher @ basis).diagonal()), rel=1e-9)


@pytest.mark.parametrize("sizes", [(2, 4), (1, 5), (3, 3)])
def test_micro_batches_equal_the_large_batch(sizes):
    make, shape = CASES["positions"]
    one, (x, y) = make(), torch.randn(2, *shape)
    other = copy.deepcopy(one)
    kfacs = [kfac_of(m) for m in (one, other)]
    for batch in (x, y):
        step(one, kfacs[0], batch)
        other.zero_grad()
        for part in batch.split(sizes):
            (loss_of(other(part)) * len(part) / N).backward()
        kfacs[1].step()
    for name in covered(one):
        assert_close(second_moment(kfacs[1], name), second_moment(kfacs[0], name))
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert_close(q.grad, p.grad)


def test_a_loss_scale_does_not_matter():
    make, shape = CASES["positions"]
    x, moments = torch.randn(2, *shape), []
    for scale in (1.0, 512.0):
        torch.manual_seed(1)
        model = make()
        kfac = kfac_of(model)
        for batch in x:
            model.zero_grad()
            (scale * loss_of(model(batch))).backward()
            for p in model.parameters():
                p.grad /= scale
            kfac.step(loss_scale=scale)
        moments.append({n: second_moment(kfac, n) for n in covered(model)})
    for name, want in moments[0].items():
        assert_close(moments[1][name], want)
