"""Method eigen_adam against a dense float64 oracle that follows the equations of the rule."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW

from kfac_bench import KFAC, eigen_adam
from kfac_bench.core.build_eigen_adam import KFAC_DEFAULTS
from kfac_bench.core.eigen_adam_optimizer import EigenAdam
from kfac_bench.core.execution import adam
from kfac_bench.core.kernels import linalg
from tests.support import oracle
from tests.support.distributed import run_ranks
from tests.support.layer_checks import assert_close
from tests.support.quick import slow

LR, BETAS, EPS, SCALE, ORTHOGONAL_SCALE = 0.01, (0.8, 0.95), 1e-8, 3.0, 1.0


class Net(nn.Module):
    """A convolution, a norm, two hidden linear layers of one shape, a tall one, and an output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.LayerNorm(12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.tall = nn.Linear(12, 20)
        self.last = nn.Linear(20, 4)

    def forward(self, x):
        x = self.norm(self.conv(x).tanh().flatten(1))
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(self.tall(x).tanh())


def batch(step, n=16):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(n, 1, 4, 4, generator=generator), torch.randint(4, (n,), generator=generator)


def step(model, optimizer, i):
    x, y = batch(i)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    grads = {n: oracle.layer_gradient(m) for n, m in matrices(model).items()}
    optimizer.step()
    return grads


def matrices(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}


def weights(model):
    """By layer: weight and bias side by side, [1, g_dim, a_dim]."""
    return {
        n: torch.cat([m.weight.flatten(1), m.bias[:, None]], 1).detach().clone()[None]
        for n, m in matrices(model).items()
    }


def newton_schulz(x, steps):
    """By the singular values: the polynomial acts on each of them alone."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag_embed(s) @ vh


class Oracle:
    """The rule of one layer, from the eigenvectors that KFAC has."""

    def __init__(self, is_hidden, steps, clip=None):
        self.clip = clip
        self.m = self.v = 0.0
        self.t, self.is_hidden, self.steps, self.basis = 0, is_hidden, steps, None

    def update(self, grad, qa, qg):
        b1, b2 = BETAS
        if self.basis is not None:
            old_a, old_g = self.basis
            self.m = qg.mT @ (old_g @ self.m @ old_a.mT) @ qa  # back to the weights, and out again
            # The variance of each sum of uncorrelated entries.
            self.v = torch.einsum(
                "ki,xkl,lj->xij", (old_g.mT @ qg)[0] ** 2, self.v, (old_a.mT @ qa)[0] ** 2
            )
        self.basis = qa, qg
        r = qg.mT @ grad @ qa
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * r
        self.v = b2 * self.v + (1 - b2) * r**2
        u = b1 * self.m / (1 - b1**self.t) + (1 - b1) * r
        root = (self.v / (1 - b2**self.t)) ** 0.5 + EPS
        floor = adam.FLOOR * torch.finfo(root.dtype).eps * root.square().mean().sqrt()
        d = u / (root + floor**2 / root)
        if self.is_hidden:
            d = ORTHOGONAL_SCALE * max(d.shape[-2:]) ** 0.5 * newton_schulz(d, self.steps)
        else:
            d = SCALE * d
        if self.clip is not None:
            rms = LR * d.square().mean().sqrt()
            d = d * min(1.0, float(self.clip / d.shape[-1] ** 0.5 / rms))
        return qg @ d @ qa.mT


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("decomposition", ["qr", "eigh"])
@pytest.mark.parametrize(
    ("orthogonalize", "clip"), [("linear", None), ("none", None), ("linear", 0.03), ("none", 0.03)]
)
def test_updates_of_all_layers_equal_the_dense_rule(orthogonalize, clip, decomposition):
    model = Net()
    optimizer = eigen_adam(
        model,
        LR,
        BETAS,
        weight_decay=0.1,
        orthogonalize=orthogonalize,
        update_clip=clip,
        decomposition=decomposition,
        kfac={"update_freq": 2, "factor_update_freq": 1, "spread": True},
    )
    hidden = {"blocks.0", "blocks.1", "tall"} if orthogonalize == "linear" else set()
    oracles = {n: Oracle(n in hidden, 3, clip) for n in matrices(model)}
    for i in range(7):
        before = weights(model)
        grads = step(model, optimizer, i)
        state = optimizer.preconditioner.state_dict()["layers"]
        for name, after in weights(model).items():
            qa, qg = (state[name][f]["eigen"][1] for f in "AG")
            want = (1 - LR * 0.1) * before[name] - LR * oracles[name].update(grads[name], qa, qg)
            assert_close(after, want, rtol=1e-9)


@pytest.mark.usefixtures("double")
def test_schedules_and_groups_may_change_the_betas_and_eps():
    """Betas of the groups are those of an optimizer that was built with them."""
    built, changed, loaded = Net(), Net(), Net()
    options = {"betas": (0.7, 0.9), "eps": 1e-3}
    optimizers = [
        eigen_adam(built, lr=LR, **options),
        eigen_adam(changed, lr=LR),
        eigen_adam(loaded, lr=LR),
    ]
    optimizers[1].param_groups[0].update(options)
    optimizers[2].load_state_dict(optimizers[0].state_dict())
    for i in range(4):
        for model, optimizer in zip((built, changed, loaded), optimizers, strict=True):
            step(model, optimizer, i)
    for model in (changed, loaded):
        for wanted, got in zip(built.parameters(), model.parameters(), strict=True):
            assert torch.equal(wanted, got)


def test_groups_may_have_different_betas():
    """Only one layer is trained, with the betas of its own group."""
    own, found = (0.5, 0.9), []
    for betas, group in ((own, {}), (BETAS, {"betas": own}), (BETAS, {})):
        model = Net()
        hidden = [*model.blocks[1].parameters()]
        rest = [p for p in model.parameters() if all(p is not each for each in hidden)]
        groups = [{"params": rest, "lr": 0.0}, {"params": hidden, **group}]
        optimizer = eigen_adam(model, LR, betas, params=groups)
        for i in range(4):
            step(model, optimizer, i)
        found.append(model.blocks[1].weight.detach())
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


def test_other_parameters_get_adamw(monkeypatch):
    model, other = Net(), Net()
    optimizer = eigen_adam(model, LR, BETAS, weight_decay=0.1)
    adamw = AdamW(other.parameters(), LR, BETAS, weight_decay=0.1)
    for i in range(4):
        # The gradients of the norm are equal if everything else is.
        other.load_state_dict(model.state_dict())
        x, y = batch(i)
        for m, o in ((model, optimizer), (other, adamw)):
            o.zero_grad()
            F.cross_entropy(m(x), y).backward()
            o.step()
        assert torch.equal(model.norm.weight, other.norm.weight)
        assert torch.equal(model.norm.bias, other.norm.bias)
        assert not torch.equal(model.tall.weight, other.tall.weight)


@pytest.mark.usefixtures("double")
def test_qr_steps_find_the_eigenvectors():
    torch.manual_seed(0)
    root = torch.randn(3, 6, 9)
    factor = root @ root.mT
    values, vectors = torch.linalg.eigh(factor)
    basis = torch.linalg.qr(torch.randn(3, 6, 6)).Q
    one, q = linalg.orthogonal_iteration(factor, basis)
    for i in range(3):
        # Columns with the largest quotients come first in QR, and keep their places.
        order = (basis[i].mT @ factor[i] @ basis[i]).diagonal().argsort(descending=True)
        want_q, want_r = torch.linalg.qr(factor[i] @ basis[i][:, order])
        assert_close(q[i][:, order], want_q)
        assert_close(one[i][order], want_r.diagonal().abs())
    for _ in range(300):
        one, q = linalg.orthogonal_iteration(factor, q)
    order = one.argsort(-1)
    assert_close(one.gather(-1, order), values, rtol=1e-6)
    q = q.gather(-1, order.unsqueeze(-2).expand_as(q))
    assert_close((q.mT @ vectors).abs(), torch.eye(6).expand(3, 6, 6), rtol=1e-6)


def test_a_qr_step_keeps_the_eigenvectors_of_a_singular_factor():
    """G of a softmax head is singular: eigh returns its null vector as the first column."""
    torch.manual_seed(0)
    root = torch.randn(2, 6, 5)
    factor = root @ root.mT
    basis = torch.linalg.eigh(factor).eigenvectors
    _, q = linalg.orthogonal_iteration(factor, basis)
    assert_close((q.mT @ basis).abs(), torch.eye(6).expand(2, 6, 6), rtol=1e-4)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 8, 5), (1, 6, 6)])
def test_newton_schulz_moves_singular_values(shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    for steps in (1, 2, 3, 5):
        left, right = (linalg.orthogonalizer(gram, steps) for gram in (x @ x.mT, x.mT @ x))
        assert_close(left @ x, newton_schulz(x, steps), rtol=1e-10)
        assert_close(x @ right, newton_schulz(x, steps), rtol=1e-10)
    zeros = torch.zeros(shape)
    assert (linalg.orthogonalizer(zeros @ zeros.mT, 3) @ zeros).abs().max() == 0


def test_a_side_beyond_max_dim_is_not_rotated():
    """With neither side rotated and no orthogonalization, the rule is Adam with Nesterov."""
    model, plain = Net(), Net()
    optimizer = eigen_adam(
        model,
        LR,
        BETAS,
        orthogonalize="none",
        update_clip=None,
        kfac={"max_dim": 1, "skip": ["Norm", "conv"]},
    )
    m = v = 0.0
    for i in range(1, 4):
        grads = step(model, optimizer, i)
        r = grads["tall"][0].float()  # with the bias in the last column
        m, v = 0.8 * m + 0.2 * r, 0.95 * v + 0.05 * r**2
        root = (v / (1 - 0.95**i)).sqrt() + EPS
        floor = adam.FLOOR * torch.finfo(root.dtype).eps * root.square().mean().sqrt()
        update = (0.8 * m / (1 - 0.8**i) + 0.2 * r) / (root + floor**2 / root)
        with torch.no_grad():
            plain.tall.weight -= LR * SCALE * update[:, :-1]
    torch.testing.assert_close(model.tall.weight, plain.tall.weight)


@pytest.mark.usefixtures("double")
def test_hidden_layers_are_orthogonalized_without_eigenvectors():
    model = Net()
    optimizer = eigen_adam(model, LR, BETAS, update_clip=None, kfac={"max_dim": 1})
    oracles = {n: Oracle(n != "last", 3) for n in matrices(model) if n != "conv"}
    for i in range(3):
        before, grads = weights(model), step(model, optimizer, i)
        after = weights(model)
        for name, rule in oracles.items():
            a, g = (torch.eye(n) for n in reversed(grads[name].shape[-2:]))
            want = before[name] - LR * rule.update(grads[name], a[None], g[None])
            assert_close(after[name], want, rtol=1e-9)


def test_a_vocabulary_head_is_not_orthogonalized():
    """BERT has another head after the one of the vocabulary."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 8193), nn.Linear(8193, 2))
    plan = eigen_adam(model).preconditioner.plan
    assert [p.layer.is_orthogonalized for p in plan.placements] == [True, False, False]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_hidden_to_hidden_weights_are_orthogonalized(kind):
    model = nn.ModuleDict({"recurrent": kind(3, 4, num_layers=2), "head": nn.Linear(4, 2)})
    plan = eigen_adam(model).preconditioner.plan
    found = {p.layer.name for p in plan.placements if p.layer.is_orthogonalized}
    assert found == {"recurrent.hh_l0", "recurrent.hh_l1"}


@pytest.mark.parametrize(("g_dim", "a_dim"), [(130, 200), (200, 130)])
@pytest.mark.parametrize("is_rotated", [True, False])
def test_large_updates_in_bfloat16_differ_by_rounding_only(g_dim, a_dim, is_rotated):
    torch.manual_seed(0)
    a, g = (torch.linalg.qr(torch.randn(2, n, n)).Q for n in (a_dim, g_dim))
    bases = (a, g) if is_rotated else (None, None)
    grads = torch.randn(3, 2, g_dim, 1) * torch.randn(3, 2, 1, a_dim)
    outs = []
    for has_bfloat16 in (True, False):
        rule = replace(EigenAdam(nn.Linear(1, 1).parameters()).rule, has_bfloat16=has_bfloat16)
        moments = adam.AdamMoments.start(grads[0])
        for grad in grads:
            out = adam.direction(grad, *bases, moments, rule, is_orthogonalized=True)
            moments.steps += 1
        outs.append(out)
        zero = torch.zeros(1, g_dim, a_dim)
        fresh = adam.AdamMoments.start(zero)
        assert not adam.direction(zero, None, None, fresh, rule, is_orthogonalized=True).any()
    assert 1e-4 < float((outs[0] - outs[1]).norm() / outs[1].norm()) < 0.02


def weights_after_20_steps(rows, rank, change, seed=0, **kfac):
    """Of a perceptron whose inputs lie in a subspace, if there is a rank."""
    torch.manual_seed(seed)
    sizes = (20, 32, 32)
    hidden = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
    model = nn.Sequential(*hidden, nn.Linear(32, 5))
    optimizer = eigen_adam(model, 0.001, kfac=kfac)
    ranks, rank_of = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    subspace, labels = torch.randn(rank or 20, 20), torch.randn(20, 5)
    for i in range(20):
        generator = torch.Generator().manual_seed(100 + 1000 * seed + i)
        x = torch.randn(rows, rank or 20, generator=generator)
        x = x @ subspace if rank else x
        y = (x @ labels).argmax(1)
        if change == "order":
            order = torch.randperm(rows, generator=generator)
            x, y = x[order], y[order]
        x, y = x.chunk(ranks)[rank_of], y.chunk(ranks)[rank_of]
        parts = 4 if change == "accumulation" else 1
        optimizer.zero_grad()
        for part, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.cross_entropy(model(part), target) / parts).backward()
        for p in model.parameters() if ranks > 1 else ():
            dist.all_reduce(p.grad.div_(ranks))
        optimizer.step()
    if ranks > 1:
        optimizer.preconditioner.detach()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def weights_of_seeds(rows, rank, change, **kfac):
    return [weights_after_20_steps(rows, rank, change, seed, **kfac) for seed in range(3)]


def median_difference(usual, other):
    both = zip(usual, other, strict=True)
    return sorted(float((b - a).norm() / a.norm()) for a, b in both)[1]


@pytest.mark.parametrize(
    ("rows", "rank", "change"),
    [
        slow(64, None, "order"),
        (64, None, "accumulation"),
        (8, None, "order"),
        slow(8, None, "accumulation"),
        slow(64, 5, "order"),
        slow(64, 5, "accumulation"),
    ],
)
def test_rounding_errors_stay_small(rows, rank, change):
    """Where the gradient is zero but for rounding, Adam would divide noise by noise.

    Tanh, because a ReLU whose input is nearly zero makes a rounding error large. Which seed misses
    the goal depends on the processor, so the median of three counts.
    """
    usual, other = (weights_of_seeds(rows, rank, each) for each in ("", change))
    assert 0 < median_difference(usual, other) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("spread", [True, False])
def test_few_seeds_miss_the_goal_and_none_by_much(spread):
    """The goal is 0.1 % as above. Of 24 runs 1 misses it, without spread 3 (on an Intel CPU 2)."""
    differences = []
    for seed, (rows, rank) in itertools.product(range(8), [(64, None), (8, None), (64, 5)]):
        usual, other = (
            weights_after_20_steps(rows, rank, change, seed, spread=spread)
            for change in ("", "order")
        )
        differences.append(float((other - usual).norm() / usual.norm()))
    print(*(f"{d:.1e}" for d in sorted(differences)))  # noqa: T201 (a page quotes it)
    assert sum(d >= 1e-3 for d in differences) <= 4
    assert max(differences) < 1e-2


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("rows", "rank", "change"),
    [slow(8, None, ""), slow(8, None, "accumulation"), slow(64, 5, ""), (64, 5, "accumulation")],
)
def test_rounding_errors_stay_small_on_ranks(rows, rank, change):
    usual = weights_of_seeds(rows, rank, "", spread=False)  # as ranks do
    for other in run_ranks(2, weights_of_seeds, rows, rank, change):
        assert 0 < median_difference(usual, other) < 1e-3


class Lookup(nn.Module):
    """An embedding and two layers, one of them with two groups."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(30, 8)
        self.grouped = nn.Conv1d(8, 4, 1, groups=2)
        self.last = nn.Linear(4, 5)

    def forward(self, tokens):
        return self.last(self.grouped(self.tokens(tokens).mT).mean(-1))


@pytest.mark.parametrize("lr", [0.001, 1.0, 100.0, 0.0])
def test_no_update_is_longer_than_the_clip_allows(lr):
    """However large the rate: the root mean square is at most clip / sqrt(inputs)."""
    model = Lookup()
    groups = [
        {"params": [*model.tokens.parameters(), *model.grouped.parameters()]},
        {"params": model.last.parameters(), "lr": 0.5 * lr},  # the clip sees each group's rate
    ]
    optimizer = eigen_adam(model, lr, params=groups, update_clip=0.02)
    before = copy.deepcopy(model)
    F.cross_entropy(model(torch.arange(24).view(8, 3)), torch.arange(8) % 5).backward()
    optimizer.step()
    changes = {
        n: (p - old).detach()
        for (n, p), old in zip(model.named_parameters(), before.parameters(), strict=True)
    }
    last = torch.cat([changes["last.weight"], changes["last.bias"][:, None]], 1)
    grouped = torch.cat([changes["grouped.weight"][..., 0], changes["grouped.bias"][:, None]], 1)
    # By matrix: its change, and the square root of its inputs. An embedding has one input.
    found = [(changes["tokens.weight"], 1), (last, 5), (grouped[:2], 5), (grouped[2:], 5)]
    sizes = [float(x.square().mean().sqrt() * inputs**0.5) for x, inputs in found]
    if lr >= 1:
        assert sizes == pytest.approx([0.02] * 4, rel=1e-4)
    elif lr:
        assert all(0 < size <= 0.02 * (1 + 1e-4) for size in sizes)
        assert min(sizes) < 0.01
    else:
        assert sizes == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("more", "first"),
    [
        ({}, 3),
        ({"background": True}, 3),
        ({"background": True}, 2),
        ({"state_dtype": torch.bfloat16}, 3),
        ({"state_dtype": torch.float16, "background": True}, 3),
    ],
    ids=["default", "background", "background, early", "bfloat16", "background, float16"],
)
def test_a_resumed_run_is_the_same_bit_by_bit(more, first):
    """At step 3 decompositions in the background have begun that are not in use.

    At step 2 some layers have no decomposition yet, but moments.
    """
    options = {"weight_decay": 0.1, "kfac": {"update_freq": 2, "factor_update_freq": 1} | more}
    model = Net()
    optimizer = eigen_adam(model, LR, **options)
    for i in range(first):
        step(model, optimizer, i)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for i in range(first, 8):
        step(model, optimizer, i)
    again = Net()
    again.load_state_dict(saved[0])
    resumed = eigen_adam(again, LR, **options)
    resumed.load_state_dict(saved[1])
    for i in range(first, 8):
        step(again, resumed, i)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_moments_start_again_when_the_last_factor_comes_also_if_it_is_a_diagonal():
    """In the background the embedding's G comes into use in step 2, its diagonal A in step 4."""
    model = Lookup()
    optimizer = eigen_adam(model, LR, kfac={"background": True})
    counts = []
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.arange(24).view(8, 3)), torch.arange(8) % 5).backward()
        optimizer.step()
        layers = optimizer.preconditioner.state_dict()["layers"]
        counts.append(layers["tokens"]["adam"]["steps"])
    assert counts == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_state_changes_updates_little(dtype):
    """Factors and eigenvectors are stored in 16 bits; the moments stay in 32 bits."""
    weights_after = []
    for state in (torch.float32, dtype):
        model = Net()
        kfac = {"update_freq": 2, "factor_update_freq": 1, "state_dtype": state}
        optimizer = eigen_adam(model, LR, kfac=kfac)
        start = weights(model)
        for i in range(4):
            step(model, optimizer, i)
        weights_after.append({n: w - start[n] for n, w in weights(model).items()})
        layers = optimizer.preconditioner.state_dict()["layers"]
        assert layers["tall"]["adam"]["first"].dtype is torch.float32
    for name, want in weights_after[0].items():
        cosine = F.cosine_similarity(weights_after[1][name].flatten(), want.flatten(), dim=0)
        assert cosine > 0.9, name
        assert not torch.equal(weights_after[1][name], want), name


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_that_a_grad_scaler_skips_leaves_no_trace(bad):
    """Gradients overflow in a step; the run goes on as if there had been no such step."""
    kfac = {"update_freq": 100, "factor_update_freq": 100, "early_updates": False}
    models = Net(), Net()
    optimizers = []
    for model in models:
        optimizers.append(EigenAdam(model.parameters(), LR))
        optimizers[-1].preconditioner = KFAC(
            model, optimizers[-1], method="eigen_adam", trust_ratio=None, grafting=False, **kfac
        )
    for i, number in enumerate([0, 1, bad, 2, bad, 3]):
        for model, optimizer, is_hit in zip(models, optimizers, (True, False), strict=True):
            is_bad = number is bad
            if is_bad and not is_hit:
                continue
            x, y = batch(i if is_bad else number)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if is_bad:  # in one of two layers of one shape, which are a batch, and in another layer
                model.blocks[0].weight.grad[0, 0] = bad
                model.conv.bias.grad[1] = bad
                for p in (*model.blocks[1].parameters(), *model.tall.parameters()):
                    p.grad.fill_(bad)
                for p in model.last.parameters():
                    p.grad.fill_(bad)
            optimizer.preconditioner.step(lambda: 1.0)
            if not is_bad:
                optimizer.step()
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, two)
    saved = optimizers[0].preconditioner.state_dict()["layers"]["tall"]["adam"]
    assert (saved["steps"], saved["skipped"].item()) == (6, 2)


def test_layers_that_a_step_does_not_reach_keep_their_moments():
    """Two layers of one shape, of which a step reaches one, are a batch no more."""
    torch.manual_seed(0)
    model = nn.ModuleDict({n: nn.Linear(5, 5) for n in ("a", "b", "last")})
    each = nn.ModuleDict({n: nn.Linear(5, 5) for n in ("a", "b", "last")})
    each.load_state_dict(model.state_dict())
    optimizer = eigen_adam(model, LR, kfac={"update_freq": 1, "factor_update_freq": 1})
    # The same layers, but never a batch.
    alone = {
        n: eigen_adam(nn.ModuleList([each[n], each["last"]]), LR,
                      kfac={"update_freq": 1, "factor_update_freq": 1})
        for n in ("a",)
    }  # fmt: skip
    x = torch.randn(8, 5)
    for i in range(4):
        used = ("a", "b") if i % 2 else ("a",)
        optimizer.zero_grad()
        sum(model[n](x * (i + 1)).square().mean() for n in used).backward()
        optimizer.step()
        alone["a"].zero_grad()
        each["a"](x * (i + 1)).square().mean().backward()
        alone["a"].step()
    store = optimizer.preconditioner._executor.store
    assert {n: m.steps for n, m in store.adam.items()} == {"a": 4, "b": 2}
    torch.testing.assert_close(model["a"].weight, each["a"].weight)


def test_maximize_takes_the_steps_that_minimize_the_negative_loss():
    models = Net(), Net()
    for sign, model in zip((1, -1), models, strict=True):
        group = {"params": model.parameters(), "maximize": sign < 0, "weight_decay": 0.1}
        optimizer = eigen_adam(model, LR, params=[group])
        for i in range(3):
            x, y = batch(i)
            optimizer.zero_grad()
            (sign * F.cross_entropy(model(x), y)).backward()
            optimizer.step()
    minimized, maximized = models
    for ours, theirs in zip(minimized.parameters(), maximized.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


MISUSE = {
    "SGD": (lambda m: KFAC(m, SGD(m.parameters(), 0.1), method="eigen_adam"), "EigenAdam"),
    "momentum": (
        lambda m: KFAC(
            m, AdamW(m.parameters()), method="eigen_adam", trust_ratio=None, grafting=False
        ),
        "second momentum",
    ),
    "another method": (lambda m: KFAC(m, EigenAdam(m.parameters())), "method=eigen"),
    "clip": (lambda m: eigen_adam(m, kfac={"kl_clip": 0.1}), "kl_clip=0.1"),
    "damping": (lambda m: eigen_adam(m, kfac={"damping": 0.1}), "damping=0.1"),
    "grafting": (lambda m: eigen_adam(m, kfac={"grafting": True}), "grafting"),
    "unknown choice": (lambda m: eigen_adam(m, orthogonalize="all"), "linear, none"),
    "unknown solver": (lambda m: eigen_adam(m, decomposition="svd"), "qr, eigh"),
    "amsgrad": (
        lambda m: eigen_adam(m, params=[{"params": m.parameters(), "amsgrad": True}]),
        "Remove amsgrad",
    ),
    "scale": (lambda m: eigen_adam(m, orthogonal_scale=0.0), "orthogonal_scale"),
    "update_clip": (lambda m: eigen_adam(m, update_clip=0.0), "update_clip=0.0"),
    "steps": (lambda m: eigen_adam(m, orthogonal_steps=0), "orthogonal_steps"),
    "interval": (lambda m: eigen_adam(m, kfac={"update_freq": "often"}), "update_freq=.often. at"),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_one_clear_error(case):
    build, words = MISUSE[case]
    with pytest.raises(ValueError, match=words) as error:
        build(Net())
    assert "\n" not in str(error.value)


def test_an_optimizer_without_kfac_refuses_to_step():
    model = Net()
    optimizer = EigenAdam(model.parameters())
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    with pytest.raises(RuntimeError, match=r"kfac_bench\.eigen_adam"):
        optimizer.step()
    optimizer = eigen_adam(model)
    optimizer.preconditioner.detach()
    with pytest.raises(RuntimeError, match=r"kfac_bench\.eigen_adam"):
        optimizer.step()


def test_hooks_of_the_optimizer_run_once():
    """AdamW's own step is wrapped by torch, too, as soon as an AdamW exists."""
    model = Net()
    AdamW(model.parameters())
    optimizer, calls = eigen_adam(model), []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    step(model, optimizer, 0)
    assert calls == [1]
    assert optimizer.preconditioner.steps == 1


def kfac_for(model, optimizer):
    return KFAC(model, optimizer, **KFAC_DEFAULTS)


def test_detaching_a_kfac_again_leaves_the_next_one_alone():
    model = Net()
    optimizer = EigenAdam(model.parameters())
    first = kfac_for(model, optimizer)
    first.detach()
    second = kfac_for(model, optimizer).attach()
    first.detach()
    step(model, optimizer, 0)
    assert second.steps == 1


def test_a_kfac_that_is_gone_gives_no_directions():
    """Without a name and without attach() nothing keeps it, and gradients stay as they are."""
    model = Net()
    optimizer = EigenAdam(model.parameters())
    kfac_for(model, optimizer)
    with pytest.raises(RuntimeError, match="EigenAdam has no KFAC"):
        step(model, optimizer, 0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_bias_whose_weight_is_frozen_gets_adamw(set_to_none):
    """As in fine-tuning of biases alone. K-FAC leaves such a layer as it is."""
    model = Net()
    optimizer = eigen_adam(model, LR, BETAS)
    model.tall.weight.requires_grad_(False).grad = None if set_to_none else torch.zeros(20, 12)
    bias = nn.Parameter(model.tall.bias.detach().clone())
    usual = AdamW([bias], LR, BETAS, weight_decay=0.0)
    for i in range(2):
        x, y = batch(i)
        optimizer.zero_grad(set_to_none)
        F.cross_entropy(model(x), y).backward()
        bias.grad = model.tall.bias.grad.clone()
        optimizer.step()
        usual.step()
        assert_close(model.tall.bias.detach(), bias.detach(), rtol=1e-5)


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="no layer to precondition"):
        eigen_adam(nn.Sequential(nn.LayerNorm(3)))
