"""The Fisher of the model's own labels, against its definition: an expectation over labels.

G is the mean over samples of the second moment of each sample's own gradient, whose labels the
model draws; expectations are sums over all labels here, nothing is sampled to check samples.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_bench.core.capture import fisher
from tests.support import oracle
from tests.support.layer_checks import assert_close, assert_same, factors_of, kfac_of

pytestmark = pytest.mark.usefixtures("double")
N = 5


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def segmenter():
    return nn.Sequential(nn.Conv2d(2, 4, 1), nn.Tanh(), nn.Conv2d(4, 3, 1))


def expected_g(model, x, loss_of_labels, labels_and_weights, reduce=False):
    """By layer: the expectation of G over labels of one sample at a time, loss and all by autograd.

    ``labels_and_weights(output)`` lists the labels of one sample [1, ...] with probabilities.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    sums = dict.fromkeys(layers, 0)
    for i in range(len(x)):
        with torch.no_grad():
            labels = list(labels_and_weights(model(x[i : i + 1]), i))
        for label, weight in labels:
            recorder = oracle.Calls(layers.values())
            loss_of_labels(model(x[i : i + 1]), label, i).backward()
            for handle in recorder.handles:
                handle.remove()
            for name, module in layers.items():
                rows = [oracle.layer_rows(module, *call) for call in recorder.calls[module]]
                sums[name] += weight * oracle.layer_factors(rows, reduce)[1] / len(x)
    model.zero_grad()
    return sums


def fisher_factors(model, x, kind, likelihood="categorical", weight_sharing="expand", **options):
    kfac = kfac_of(model, fisher=kind, weight_sharing=weight_sharing)
    output = model(x)
    kfac.fisher_backward(output, likelihood, **options)
    output.square().sum().backward()  # any loss: it must not matter
    kfac.step()
    got = factors_of(kfac)
    kfac.detach()
    return got


@pytest.mark.parametrize("kind", ["mc", "type2"])
@pytest.mark.parametrize("likelihood", fisher.LIKELIHOODS)
def test_a_micro_batch_without_examples_changes_nothing(likelihood, kind):
    model, x, results = mlp(), torch.randn(N, 4), []
    for parts in ([x], [x, x[:0]]):
        torch.manual_seed(0)
        kfac = kfac_of(model, fisher=kind)
        for part in parts:
            output = model(part)
            kfac.fisher_backward(output, likelihood)
            output.square().sum().backward()
        kfac.step()
        results.append(factors_of(kfac))
        kfac.detach()
        model.zero_grad()
    assert_same(*results)


def all_classes(output, i, dim=-1):
    """Every assignment of classes to positions, with its probability."""
    p = output.softmax(dim).movedim(dim, -1)
    for classes in itertools.product(range(p.shape[-1]), repeat=p[..., 0].numel()):
        y = torch.tensor(classes).view(p.shape[:-1])
        yield y, p.gather(-1, y.unsqueeze(-1)).prod()


BOTH = pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])


def test_type2_of_cross_entropy():
    model, x = mlp(), torch.randn(N, 4)
    got = fisher_factors(model, x, "type2")
    want = expected_g(model, x, lambda out, y, i: F.cross_entropy(out, y), all_classes)
    for name, g in want.items():
        assert_close(got[name]["G"], g)
    a = torch.cat([x, torch.ones(N, 1)], 1)
    assert_close(got["0"]["A"][0], a.T @ a / N)


def test_positions_count_once_however_many_gradients_are_sent_back():
    """The convention sc20 multiplies G by the number of positions, which is 1 here."""
    model, x, factors = mlp(), torch.randn(N, 4), []
    for convention in ("kfc", "sc20"):
        kfac = kfac_of(model, fisher="type2", factor_convention=convention)
        kfac.fisher_backward(model(x))
        kfac.step()
        factors.append(factors_of(kfac))
        kfac.detach()
    for name, want in factors[0].items():
        assert_close(factors[1][name]["G"], want["G"])


def test_type2_of_one_output_per_sample_draws_nothing():
    output, state = torch.randn(N, 3), torch.get_rng_state()
    for likelihood in ("categorical", "gaussian", "bernoulli"):
        made, _ = fisher.seeds(output, "type2", likelihood)
        assert len(list(made)) == 3
    assert torch.equal(torch.get_rng_state(), state)


def test_type2_equals_the_gauss_newton_matrix_of_the_last_layer():
    """Where K-FAC is exact: one sample, H of the logits by torch.func."""
    model, x = mlp(), torch.randn(1, 4)
    got = fisher_factors(model, x, "type2")["2"]
    y = torch.tensor([1])
    hessian = torch.func.hessian(lambda z: F.cross_entropy(z[None], y))(model(x)[0].detach())
    assert_close(got["G"][0], hessian)


MASK = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 0, 1], [1, 0, 0], [1, 1, 0]])


def mean_over_signs(monkeypatch, run):
    """Of G, exactly: over all signs that three positions can have."""
    results = []
    for signs in itertools.product((-1.0, 1.0), repeat=3):
        pattern = torch.tensor(signs).view(3, 1)
        monkeypatch.setattr(fisher, "_signs_like", pattern.expand_as)
        results.append(run())
    return {n: {"G": torch.stack([r[n]["G"] for r in results]).mean(0)} for n in results[0]}


def test_signs_are_random_and_one_per_position():
    signs = fisher._signs_like(torch.zeros(50, 40, 1))
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(signs.mean()) < 5 / 2000**0.5
    assert not torch.equal(signs, fisher._signs_like(signs))


@BOTH
@pytest.mark.parametrize("masked", [False, True])
def test_type2_of_token_logits(masked, weight_sharing, monkeypatch):
    """[N, T, V]: the loss is a mean over all (unmasked) tokens of the batch."""
    model, x = mlp(), torch.randn(N, 3, 4)
    mask = MASK if masked else torch.ones_like(MASK)

    def loss(out, y, i):
        losses = F.cross_entropy(out.mT, y, reduction="none")
        return (losses * mask[i]).sum() * N / mask.sum()

    want = expected_g(model, x, loss, all_classes, weight_sharing == "reduce")
    options = {"weight_sharing": weight_sharing} | ({"mask": mask} if masked else {})
    if weight_sharing == "expand":  # these layers mix no positions: exact in one go
        got = fisher_factors(model, x, "type2", **options)
    else:
        got = mean_over_signs(monkeypatch, lambda: fisher_factors(model, x, "type2", **options))
    for name, g in want.items():
        assert_close(got[name]["G"], g)


def attention_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = self.first(x)
            return self.last((h @ h.mT).softmax(-1) @ h)

    return Model()


@BOTH
def test_type2_of_tokens_that_see_each_other_is_unbiased(weight_sharing, monkeypatch):
    """Labels of different tokens are independent: their gradients must not add up.

    Sent back at once, they do in each draw; not in the mean over their random signs.
    """
    model, x = attention_model(), torch.randn(2, 3, 4)

    def loss(out, y, i):
        return F.cross_entropy(out.mT, y)

    def run():
        return fisher_factors(model, x, "type2", weight_sharing=weight_sharing)

    want = expected_g(model, x, loss, all_classes, weight_sharing == "reduce")
    got = mean_over_signs(monkeypatch, run)
    for name, g in want.items():
        assert_close(got[name]["G"], g)
    monkeypatch.setattr(fisher, "_signs_like", torch.ones_like)
    assert not torch.allclose(run()["first"]["G"], want["first"], rtol=0.1)


@pytest.mark.parametrize("dim", [1, -3])
def test_type2_of_segmentation(dim):
    """[N, V, H, W] with the classes in the middle and a mask of pixels."""
    model, x = segmenter(), torch.randn(N, 2, 1, 3)
    mask = MASK.unsqueeze(1)

    def loss(out, y, i):
        losses = F.cross_entropy(out, y, reduction="none")
        return (losses * mask[i]).sum() * N / mask.sum()

    want = expected_g(model, x, loss, lambda out, i: all_classes(out, i, 1))
    got = fisher_factors(model, x, "type2", dim=dim, mask=mask)
    for name, g in want.items():
        assert_close(got[name]["G"], g)


@pytest.mark.parametrize("s", [1, 4, 16])
def test_with_s_tokens_the_product_is_1_over_s_of_the_gauss_newton_matrix(s, monkeypatch):
    """The loss is a mean over N s tokens, of which K-FAC cannot know. With weights of zero all
    tokens have the same probabilities, so that the Kronecker product is exact."""
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(N, s, 4)
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.copy_(torch.randn(3))
    rows = torch.cat([x, torch.ones(N, s, 1)], -1).flatten(0, 1)

    def loss(weight):  # of a linear model the Hessian is the Gauss-Newton matrix
        return F.cross_entropy(rows @ weight.view(3, 5).mT, torch.zeros(N * s, dtype=torch.long))

    weight = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach().flatten()
    gauss_newton = torch.autograd.functional.hessian(loss, weight)
    monkeypatch.setattr(fisher, "_signs_like", torch.ones_like)  # a layer that mixes no positions
    factors = fisher_factors(model, x, "type2")["0"]
    product = torch.kron(factors["G"][0], factors["A"][0])
    assert_close(s * product, gauss_newton)


@pytest.mark.parametrize("shape", [(N, 4), (N, 3, 4)])
@pytest.mark.parametrize("curvature", [1.0, 0.7])
@BOTH
def test_type2_of_squared_error(shape, curvature, weight_sharing):
    """Gaussian noise of variance 1/curvature has its second moment in one point per sigma."""
    model, x = mlp(), torch.randn(shape)

    def labels(out, i):  # independent of each other: one coordinate at a time is enough
        for k in range(out.numel()):
            noise = torch.zeros_like(out).view(-1)
            noise[k] = curvature**-0.5
            yield out + noise.view_as(out), 1.0

    def loss(out, y, i):
        return curvature / 2 * (out - y).square().sum()

    want = expected_g(model, x, loss, labels, weight_sharing == "reduce")
    got = fisher_factors(
        model, x, "type2", "gaussian", curvature=curvature, weight_sharing=weight_sharing
    )
    for name, g in want.items():
        assert_close(got[name]["G"], g)


def all_bits(output, i):
    p = output.sigmoid()
    for bits in itertools.product((0.0, 1.0), repeat=p.numel()):
        y = torch.tensor(bits).view_as(p)
        yield y, torch.where(y > 0, p, 1 - p).prod()


@BOTH
def test_type2_of_binary_cross_entropy(weight_sharing):
    model, x = mlp(), torch.randn(N, 2, 4)

    def loss(out, y, i):
        return F.binary_cross_entropy_with_logits(out, y, reduction="sum")

    want = expected_g(model, x, loss, all_bits, weight_sharing == "reduce")
    got = fisher_factors(model, x, "type2", "bernoulli", weight_sharing=weight_sharing)
    for name, g in want.items():
        assert_close(got[name]["G"], g)


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli"])
def test_type2_of_one_number_per_sample(likelihood):
    """The shape [N] means the same as [N, 1]."""
    model, x, found = nn.Sequential(nn.Linear(4, 1)), torch.randn(N, 4), []
    for shape in ((N,), (N, 1)):
        kfac = kfac_of(model, fisher="type2")
        output = model(x).view(shape)
        kfac.fisher_backward(output, likelihood)
        output.square().mean().backward()
        kfac.step()
        found.append(factors_of(kfac)["0"]["G"])
        kfac.detach()
    assert_close(*found)


LIKELIHOODS = {
    "categorical": ((N, 4), {}),
    "tokens": ((N, 3, 4), {"mask": MASK}),
    "gaussian": ((N, 4), {"curvature": 0.7}),
    "bernoulli": ((N, 4), {}),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_one_draw_is_unbiased(name):
    """The mean of 2000 draws is within 5 standard errors of type2, element by element."""
    shape, options = LIKELIHOODS[name]
    likelihood = "categorical" if name == "tokens" else name
    output = torch.randn(*shape[:-1], 3)
    exact = 0
    made, count = fisher.seeds(output, "type2", likelihood, **options)
    for seed in made:
        flat = seed.flatten(0, -2)
        exact = exact + flat.unsqueeze(-1) * flat.unsqueeze(-2)
    assert count == output[..., 0].numel()
    times = 2000  # the same output again and again, in one batch
    if "mask" in options:
        options = {"mask": MASK.repeat(times, 1)}
    again = output.repeat(times, *[1] * (output.ndim - 1))
    (seed,), _ = fisher.seeds(again, "mc", likelihood, **options)
    flat = seed.unflatten(0, (times, -1)).flatten(1, -2)
    draws = flat.unsqueeze(-1) * flat.unsqueeze(-2)
    error = (draws.mean(0) - exact).abs()
    assert (error <= 5 * draws.std(0) / times**0.5 + 1e-9).all()
    assert draws.std(0).max() > 0.01


def test_the_mean_of_drawn_factors_approaches_type2():
    """Each sample 300 times in the batch, 20 batches; within 5 standard errors."""
    model, x = mlp(), torch.randn(N, 4)
    exact = fisher_factors(model, x, "type2")
    draws = [fisher_factors(model, x.repeat(300, 1), "mc") for _ in range(20)]
    for name, want in exact.items():
        got = torch.stack([d[name]["G"] for d in draws])
        error = (got.mean(0) - want["G"]).abs()
        assert (error <= 5 * got.std(0) / len(draws) ** 0.5 + 1e-12).all()
        assert error.max() < 0.05 * want["G"].abs().max()
        assert_close(draws[0][name]["A"], want["A"])


def test_one_draw_is_the_gradient_of_the_loss_of_some_label():
    output = torch.randn(N, 3)
    (seed,), count = fisher.seeds(output, "mc")
    p = output.softmax(1)
    drawn = (p - seed).round()
    assert count == N
    assert torch.equal(drawn.sum(1), torch.ones(N))
    assert_close(p - drawn, seed)
    (seed,), _ = fisher.seeds(output, "mc", "bernoulli")
    assert set((output.sigmoid() - seed).round().unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("kind", ["mc", "type2"])
def test_no_gradient_is_touched(kind):
    model, x = mlp(), torch.randn(N, 4, requires_grad=True)
    kfac = kfac_of(model, fisher=kind)
    output = model(x)
    kfac.fisher_backward(output)
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())
    F.cross_entropy(output, torch.zeros(N, dtype=torch.long)).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    kfac.fisher_backward(model(x))
    assert all(map(torch.equal, grads, (p.grad for p in model.parameters())))


def test_the_training_loss_does_not_matter():
    model, x = mlp(), torch.randn(N, 4)
    results = []
    for power in (1, 3):
        kfac = kfac_of(model, fisher="type2")
        output = model(x)
        kfac.fisher_backward(output)
        (1e3**power * output.sum()).backward()
        kfac.step(loss_scale=7.0)
        results.append(factors_of(kfac))
        kfac.detach()
    for name in results[0]:
        assert torch.equal(results[0][name]["G"], results[1][name]["G"])


@pytest.mark.parametrize("kind", ["mc", "type2"])
def test_a_missing_fisher_backward_is_an_error_that_says_what_to_do(kind):
    model = mlp()
    kfac = kfac_of(model, fisher=kind, factor_update_freq=2)
    model(torch.randn(N, 4)).sum().backward()
    missing = r"call fisher_backward\(output\) between forward and"
    with pytest.raises(RuntimeError, match=missing):
        kfac.step()
    kfac.fisher_backward(model(torch.randn(N, 4)))
    kfac.step()
    model.zero_grad()
    model(torch.randn(N, 4)).sum().backward()
    kfac.step()  # no factors are due: nothing is missing
    model.zero_grad()
    model(torch.randn(N, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=missing):
        kfac.step()


def test_fisher_backward_does_nothing_if_no_factors_are_due():
    model, x = mlp(), torch.randn(N, 4)
    kfac = kfac_of(model, fisher="type2", factor_update_freq=2)
    kfac.fisher_backward(model(x))
    kfac.step()
    with torch.no_grad():
        kfac.fisher_backward(model(x))  # would fail: there is no graph
    kfac.detach()
    with torch.no_grad():
        kfac.fisher_backward(model(x))
    empirical = kfac_of(model)
    with torch.no_grad():
        empirical.fisher_backward(model(x))


def test_unknown_likelihoods_are_refused():
    model = mlp()
    kfac = kfac_of(model, fisher="mc")
    with pytest.raises(ValueError, match="choose one of categorical, gaussian, bernoulli"):
        kfac.fisher_backward(model(torch.randn(N, 4)), "poisson")


def test_the_classes_of_an_image_must_be_named():
    """The classes of torch's cross entropy are in dimension 1 there, and not in the last one."""
    model = nn.Conv2d(2, 3, 1)
    kfac = kfac_of(model, fisher="mc")
    with pytest.raises(ValueError, match=r"output has 4 dimensions; name that of the classes"):
        kfac.fisher_backward(model(torch.randn(N, 2, 4, 4)))
    kfac.fisher_backward(model(torch.randn(N, 2, 4, 4)), dim=1)


@BOTH
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian", "bernoulli"])
def test_unequal_micro_batches_equal_the_large_one(likelihood, weight_sharing):
    x = torch.randn(9, 2, 4) if likelihood != "categorical" else torch.randn(9, 4)
    large, small = mlp(), mlp()
    small.load_state_dict(large.state_dict())
    kfacs = [kfac_of(m, fisher="type2", weight_sharing=weight_sharing) for m in (large, small)]
    for model, kfac, parts in (
        (large, kfacs[0], [slice(0, 9)]),
        (small, kfacs[1], [slice(0, 4), slice(4, 8), slice(8, 9)]),
    ):
        for part in parts:
            output = model(x[part])
            kfac.fisher_backward(output, likelihood)
            (output.square().sum() / 9).backward()
        kfac.step()
    got, want = factors_of(kfacs[1]), factors_of(kfacs[0])
    for name in want:
        for key in "AG":
            assert_close(got[name][key], want[name][key])
    for p, q in zip(small.parameters(), large.parameters(), strict=True):
        assert_close(p.grad, q.grad)


def test_two_forwards_then_two_fisher_backwards():
    """Each reaches the layers of its own forward."""
    model, x = mlp(), torch.randn(9, 4)
    kfac = kfac_of(model, fisher="type2")
    outputs = model(x[:4]), model(x[4:])
    for output in outputs:
        kfac.fisher_backward(output)
    sum(out.sum() for out in outputs).backward()
    kfac.step()
    kfac.detach()
    got, want = factors_of(kfac), fisher_factors(model, x, "type2")
    for name in want:
        for key in "AG":
            assert_close(got[name][key], want[name][key])


@pytest.mark.parametrize("scale", [1.0, 1 / 9, 128.0])
def test_the_reduction_of_the_loss_does_not_matter(scale):
    """Mean, sum, scaled: the empirical Fisher needs to be told, the model's own does not."""
    model, x = mlp(), torch.randn(9, 4)
    y = torch.arange(9) % 3
    results = []
    for loss_scale in (1.0, scale):
        kfac = kfac_of(model)
        model.zero_grad()
        (loss_scale * F.cross_entropy(model(x), y)).backward()
        for p in model.parameters():
            p.grad /= loss_scale
        kfac.step(loss_scale=loss_scale)
        results.append(factors_of(kfac))
        kfac.detach()
    assert_close(results[1]["0"]["G"], results[0]["0"]["G"])


def test_layers_of_other_branches_are_not_reached():
    """A second output of the same forward: its layers count when its own turn comes."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x):
            return self.left(x), self.right(x)

    model, x = Two(), torch.randn(N, 4)
    kfac = kfac_of(model, fisher="type2")
    left, right = model(x)
    kfac.fisher_backward(left)
    kfac.fisher_backward(right, "gaussian", curvature=2.0)
    (left.sum() + right.sum()).backward()
    kfac.step()
    kfac.detach()
    factors = factors_of(kfac)
    assert_close(factors["left"]["G"], fisher_factors(model.left, x, "type2")[""]["G"])
    assert_close(factors["right"]["G"][0], 2.0 * torch.eye(2))
    assert_close(factors["right"]["A"], factors["left"]["A"])


@pytest.mark.parametrize("parts", [lambda out: (out, out), lambda out: (out[:4], out[4:])])
def test_a_second_call_that_would_lose_statistics_is_refused(parts):
    model, x = mlp(), torch.randn(9, 4)
    kfac = kfac_of(model, fisher="type2")
    for _ in range(2):  # a new forward may send its labels
        output = model(x)
        first, second = parts(output)
        kfac.fisher_backward(first)
    with pytest.raises(RuntimeError, match="reached layer '0' twice in one forward: join the"):
        kfac.fisher_backward(second)
    output.sum().backward()
    kfac.step()
    kfac.detach()
