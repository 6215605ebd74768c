"""A and G against curvlinops' KFACLinearOperator, an independent implementation, in float64.

A is the same by definition. G differs by a constant that follows from what each calls a datum and
from how it scales a loss whose mean is also over the outputs. N samples, T loss terms (tokens) of
each, C outputs; the loss is a mean:

* Ours is the mean over N samples of the second moment of each sample's own gradient, whose loss is
  the mean of T terms: G = N sum g g^T.
* curvlinops' data are the N T loss terms: it multiplies g by N T and divides by N T, so that
  G = N T sum g g^T: **T times ours**.
* For ``MSELoss`` and ``BCEWithLogitsLoss`` (means over C, too) it multiplies the loss by sqrt(C)
  before it sends back gradients of labels ("empirical"): **C times ours** on top. Its "type-2"
  does not: the Hessian of C's mean is 2 / C (MSE), p (1 - p) / C (BCE). Ours is that of
  ``curvature / 2`` times a sum over C, so curvature = 2 / C gives MSE's **as it is**; our BCE is a
  sum over C: **curvlinops' is 1 / C of ours**.

Nothing here is fitted: the constants are N, T and C. "mc" draws other labels (Gumbel's maximum
here, ``multinomial`` there), whose mean is that of "type2": tests/core/capture/test_fisher.py.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_bench.core import KFAC

curvlinops = pytest.importorskip("curvlinops")

pytestmark = pytest.mark.usefixtures("double")
N, C = 6, 3


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x):
        weights = self.q(x) @ self.k(x).mT / x.shape[-1] ** 0.5
        return self.out(weights.softmax(-1) @ self.v(x))


class Transformer(nn.Module):
    """One block; ``pooled`` to one output per sample, or one per token: [N, C, T]."""

    def __init__(self, pooled):
        super().__init__()
        self.pooled = pooled
        self.embed = nn.Linear(5, 4)
        self.attention = Attention(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.head = nn.Linear(4, C)

    def forward(self, x):
        h = self.embed(x)
        h = h + self.attention(F.layer_norm(h, (4,)))
        h = h + self.down(self.up(F.layer_norm(h, (4,))).relu())
        return self.head(h.mean(1)) if self.pooled else self.head(h).mT


def mlp():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4), nn.ReLU(), nn.Linear(4, C))


def convnet():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 3, (3, 2), stride=2, dilation=(1, 2), bias=False),
        nn.Tanh(),
        nn.Conv2d(3, 3, 1),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(3, C),
    )


def pooled_transformer():
    return Transformer(pooled=True)


def tokens_mlp():
    """A loss of each token, and nothing that mixes tokens."""

    class Tokens(nn.Sequential):
        def forward(self, x):
            return super().forward(x).mT

    return Tokens(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, C))


def tokens_transformer():
    return Transformer(pooled=False)


SHAPES = {
    mlp: (N, 5),
    convnet: (N, 2, 6, 6),
    pooled_transformer: (N, 3, 5),
    tokens_mlp: (N, 4, 5),
    tokens_transformer: (N, 4, 5),
}


def ours(model, x, y, loss, kind, weight_sharing, **fisher_options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(
        model,
        optimizer,
        skip=[],
        fisher="type2" if kind == "type-2" else kind,
        weight_sharing=weight_sharing,
        factor_convention="kfc",
    )
    output = model(x)
    kfac.fisher_backward(output, **fisher_options)
    loss(output, y).backward()
    kfac.step()
    layers = kfac.state_dict()["layers"]
    kfac.detach()
    return {name: [layers[name][f]["factor"][0] for f in "AG"] for name in layers}


def theirs(model, x, y, loss, kind, weight_sharing):
    operator = curvlinops.KFACLinearOperator(
        model,
        loss,
        list(model.parameters()),
        [(x, y)],
        fisher_type=kind,
        kfac_approx=weight_sharing,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    a, g = operator._input_covariances, operator._gradient_covariances
    return {name: [a[name], g[name]] for name in a}


def assert_equal_up_to(ratio, got, want):
    """``want``'s G is ``ratio`` times that of ``got``."""
    assert set(got) == set(want)
    for name, (a, g) in want.items():
        for mine, other in ((got[name][0], a), (ratio * got[name][1], g)):
            scale = float(other.abs().max())
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-10 * max(scale, 1e-6))


BOTH = pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])


@BOTH
@pytest.mark.parametrize("kind", ["empirical", "type-2"])
@pytest.mark.parametrize("make", [mlp, convnet, pooled_transformer])
def test_cross_entropy(make, kind, weight_sharing):
    """T = 1: equal, without any constant."""
    model, x, y = make(), torch.randn(SHAPES[make]), torch.arange(N) % C
    loss = nn.CrossEntropyLoss()
    got = ours(model, x, y, loss, kind, weight_sharing)
    assert_equal_up_to(1, got, theirs(model, x, y, loss, kind, weight_sharing))


@BOTH
@pytest.mark.parametrize("make", [tokens_mlp, tokens_transformer])
def test_cross_entropy_of_tokens(make, weight_sharing):
    """T = 4 loss terms per sample: curvlinops' G is T times ours."""
    model, x, y = make(), torch.randn(SHAPES[make]), torch.arange(N * 4).view(N, 4) % C
    loss = nn.CrossEntropyLoss()
    got = ours(model, x, y, loss, "empirical", weight_sharing)
    assert_equal_up_to(4, got, theirs(model, x, y, loss, "empirical", weight_sharing))


def test_the_exact_fisher_of_tokens():
    """Only where tokens do not mix: curvlinops adds up what goes back from all tokens of a sample.

    We give each a random sign, as their labels are independent (tests/core/capture/test_fisher.py).
    """
    model, x = tokens_mlp(), torch.randn(SHAPES[tokens_mlp])
    y, loss = torch.arange(N * 4).view(N, 4) % C, nn.CrossEntropyLoss()
    got = ours(model, x, y, loss, "type-2", "expand", dim=1)
    assert_equal_up_to(4, got, theirs(model, x, y, loss, "type-2", "expand"))


@BOTH
@pytest.mark.parametrize("make", [mlp, convnet])
def test_squared_error(make, weight_sharing):
    """MSELoss is a mean over C, too: 2 / C is the curvature; its empirical G is C times ours."""
    model, x, y = make(), torch.randn(SHAPES[make]), torch.randn(N, C)
    loss, options = nn.MSELoss(), {"likelihood": "gaussian", "curvature": 2 / C}
    for kind, ratio in (("type-2", 1), ("empirical", C)):
        got = ours(model, x, y, loss, kind, weight_sharing, **options)
        assert_equal_up_to(ratio, got, theirs(model, x, y, loss, kind, weight_sharing))


@BOTH
def test_binary_cross_entropy(weight_sharing):
    """Ours is the Fisher of a sum over C, curvlinops' that of a mean."""
    model, x, y = mlp(), torch.randn(SHAPES[mlp]), (torch.rand(N, C) < 0.5).double()
    loss = nn.BCEWithLogitsLoss()
    for kind, ratio in (("type-2", 1 / C), ("empirical", C)):
        got = ours(model, x, y, loss, kind, weight_sharing, likelihood="bernoulli")
        assert_equal_up_to(ratio, got, theirs(model, x, y, loss, kind, weight_sharing))


def test_unequal_factors_are_seen():
    model, x, y = mlp(), torch.randn(SHAPES[mlp]), torch.arange(N) % C
    loss = nn.CrossEntropyLoss()
    got, want = (f(model, x, y, loss, "empirical", "expand") for f in (ours, theirs))
    with pytest.raises(AssertionError):
        assert_equal_up_to(1 + 1e-6, got, want)
