"""Weights that modules share, what is covered and how, and layer types of the user's own."""

import copy
import re

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from kfac_bench.core import KFAC
from kfac_bench.core.layers import coverage
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.layers.linear import LinearLayer
from tests.support.layer_checks import (
    BOTH,
    assert_close,
    assert_same,
    check,
    factors_of,
    grads_of,
    kfac_of,
    loss_of,
)

pytestmark = pytest.mark.usefixtures("double")


# sharing


@BOTH
def test_a_module_called_several_times_in_one_forward(weight_sharing):
    """Further calls are further positions of the same samples."""
    layer, x, y = nn.Linear(4, 4), torch.randn(6, 4), torch.randn(6, 3, 4)

    def forward():
        return loss_of(layer(layer(layer(x)).tanh()), 6) + loss_of(layer(y), 6)

    check(nn.Sequential(layer), forward, weight_sharing=weight_sharing)


@BOTH
def test_the_model_itself_called_twice_is_two_micro_batches(weight_sharing):
    """Also with one backward; an extra dimension of samples is the same then."""
    model, x, y = nn.Sequential(nn.Linear(4, 4)), torch.randn(6, 4), torch.randn(3, 4)
    other = copy.deepcopy(model)
    kfac, kfac_other = (kfac_of(m, weight_sharing=weight_sharing) for m in (model, other))
    (loss_of(model(x), 9) + loss_of(model(y), 9)).backward()
    loss_of(other(torch.cat([x, y])), 9).backward()
    kfac.step()
    kfac_other.step()
    assert_same(factors_of(kfac), factors_of(kfac_other))
    assert_same(grads_of(model), grads_of(other))


@BOTH
@pytest.mark.parametrize("bias", [True, False])
def test_two_linear_modules_of_one_weight_are_one_layer(bias, weight_sharing):
    torch.manual_seed(2)
    one, other, x = nn.Linear(4, 4, bias=bias), nn.Linear(4, 4, bias=bias), torch.randn(6, 4)
    other.weight, other.bias = one.weight, one.bias
    model, alone = nn.Sequential(one, nn.Tanh(), other), nn.ModuleList([copy.deepcopy(one)])
    kfacs = [kfac_of(m, weight_sharing=weight_sharing) for m in (model, alone)]
    loss_of(model(x), 6).backward()
    loss_of(alone[0](alone[0](x).tanh()), 6).backward()
    for kfac in kfacs:
        kfac.step()
    assert_same(factors_of(kfacs[0]), factors_of(kfacs[1]))
    assert_same(grads_of(model[0]), grads_of(alone[0]))
    assert len(kfacs[0].report().layers) == 1


class Tied(nn.Module):
    def __init__(self, heads=1):
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 7, bias=False) for _ in range(heads))
        for head in self.heads:
            head.weight = self.tokens.weight

    def forward(self, x):
        h = self.hidden(self.tokens(x)).tanh()
        return sum(head(h) for head in self.heads)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("skip", [[], ["Embedding"]])
def test_an_embedding_tied_to_the_head_is_left_to_the_optimizer_with_it(skip, heads):
    model = Tied(heads)
    kfac = kfac_of(model, skip=skip)
    report = kfac.report()
    assert [x.name for x in report.layers] == ["hidden"]
    reasons = {x.name: x.reason for x in report.skipped}
    assert set(reasons) == {"tokens", *(f"heads.{i}" for i in range(heads))}
    total = sum(p.numel() for p in model.parameters())
    assert report.covered_params + report.skipped_params == total
    assert re.search("weight tied to tokens", reasons["heads.0"])
    assert reasons["tokens"] == ("skip pattern 'Embedding'" if skip else "weight tied to heads.0")
    loss_of(model(torch.randint(7, (5, 3))), 5).backward()
    before = model.tokens.weight.grad.clone()
    kfac.step()
    assert torch.equal(model.tokens.weight.grad, before)


def test_one_weight_with_two_biases_is_left_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    report = kfac_of(model).report()
    assert [x.name for x in report.layers] == ["2"]
    assert [x.name for x in report.skipped] == ["0", "1"]
    assert "tied to 1" in report.skipped[0].reason


def test_one_bias_of_two_weights_leaves_both_layers_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias = model[0].bias
    report = kfac_of(model).report()
    assert [x.name for x in report.layers] == ["2"]
    assert [x.name for x in report.skipped] == ["0", "1"]
    assert "tied to 1" in report.skipped[0].reason


@pytest.mark.parametrize("options", [{"dilation": 2}, {"stride": 2}, {"padding": 1}])
def test_convolutions_of_one_weight_that_see_other_patches_are_left_out(options):
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3, **options), nn.Conv2d(3, 3, 3))
    model[1].weight, model[1].bias = model[0].weight, model[0].bias
    report = kfac_of(model).report()
    assert [x.name for x in report.layers] == ["2"]
    assert [x.reason for x in report.skipped] == ["weight tied to 1", "weight tied to 0"]


def test_embeddings_of_one_weight_with_other_padding_are_left_out():
    """What is padding in one module is a token with a gradient in the other."""
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Embedding(5, 3), nn.Linear(3, 2))
    model[1].weight = model[0].weight
    report = kfac_of(model).report()
    assert [x.name for x in report.layers] == ["2"]


@pytest.mark.parametrize(
    "other", [nn.GroupNorm(1, 4), nn.GroupNorm(2, 4, eps=0.1), nn.LayerNorm(4)], ids=str
)
def test_norms_of_one_scale_that_normalize_differently_are_left_out(other):
    model = nn.Sequential(nn.GroupNorm(2, 4), other, nn.Linear(4, 2))
    other.weight, other.bias = model[0].weight, model[0].bias
    report = kfac_of(model, skip=[]).report()
    assert [x.name for x in report.layers] == ["2"]


def test_complex_weights_are_left_out():
    """Factors are real, so the imaginary part of the gradient would be lost."""
    model = nn.Sequential(nn.Linear(4, 3, dtype=torch.complex64), nn.Linear(3, 2))
    report = kfac_of(model).report()
    assert [x.name for x in report.layers] == ["1"]
    assert "complex" in report.skipped[0].reason


def test_shared_frozen_parameters_do_not_matter():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(6, 4)
    model[2].bias = model[0].bias
    model[0].bias.requires_grad_(False)
    check(model, lambda: loss_of(model(x), 6))


def test_names_do_not_depend_on_a_wrapper_inside_the_model():
    """DistributedDataParallel needs ranks, so only the names are tested."""
    assert coverage._clean("body.module.0", {"body.module"}) == "body.0"
    assert coverage._clean("body.module._orig_mod.module", {"body.module"}) == "body.module"
    assert coverage._clean("", set()) == ""


def test_the_shared_part_of_two_attentions_is_left_out():
    one, other = nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2)
    other.in_proj_weight = one.in_proj_weight
    report = kfac_of(nn.ModuleList([one, other])).report()
    assert [x.name for x in report.layers] == ["0.out_proj", "1.out_proj"]
    assert report.skipped[0].reason == "in_proj_weight tied to 1"


@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding, nn.LayerNorm])
def test_computed_weights_are_skipped(kind):
    model = nn.Sequential(kind(4) if kind is nn.LayerNorm else kind(4, 3), nn.Linear(3, 2))
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Tanh())
    report = kfac_of(model).report()
    assert [x.name for x in report.layers] == ["1"]
    reasons = {x.name: x.reason for x in report.skipped}
    assert kind is nn.Embedding or "parametrization" in reasons["0"]
    assert report.covered_params + report.skipped_params == sum(
        p.numel() for p in model.parameters()
    )


def test_a_computed_bias_is_left_to_the_optimizer():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    nn.utils.parametrize.register_parametrization(model[0], "bias", nn.Tanh())
    kfac = kfac_of(model)
    assert [x.spec.a_dim for x in kfac.report().layers] == [3, 5]


# what is covered, and how


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
def test_a_vocabulary_head_keeps_only_the_diagonal_of_g(method):
    head, x = nn.Linear(4, 50), torch.randn(6, 3, 4)
    kfacs = []
    for max_dim in (49, 50):
        model = nn.Sequential(copy.deepcopy(head))
        kfacs.append(kfac_of(model, max_dim=max_dim, method=method))
        loss_of(model(x), 6).backward()
        kfacs[-1].step()
    (small,), (full,) = (factors_of(kfac).values() for kfac in kfacs)
    assert small["G"].shape == (1, 50)
    assert_close(small["G"][0], full["G"][0].diagonal())
    assert_close(small["A"], full["A"])
    assert "G 50 (diagonal)" in str(kfacs[0].report())
    assert "diagonal" not in str(kfacs[1].report())


def test_no_tensor_of_a_vocabulary_head_is_v_by_v():
    """100,000 words: a dense G would be 40 GB."""
    model, x = nn.Sequential(nn.Linear(2, 100_000, bias=False)).float(), torch.randn(3, 2).float()
    for method in ("eigen", "inverse", "ekfac"):
        head = copy.deepcopy(model)
        kfac = kfac_of(head, method=method)
        loss_of(head(x), 3).backward()
        kfac.step()
        sizes = [
            t.numel()
            for entry in kfac.state_dict()["layers"]["0"].values()
            for t in (entry["factor"], *entry.get("eigen", ()), *entry.get("inverse", ()))
        ]
        assert max(sizes) == 100_000


@pytest.mark.parametrize("dims", ["G", "A", "both"])
@pytest.mark.parametrize("method", ["eigen", "inverse"])
@BOTH
def test_diagonal_factors_precondition(dims, method, weight_sharing):
    layer = nn.Linear(*{"G": (3, 9), "A": (9, 3), "both": (9, 8)}[dims])
    x = torch.randn(6, 2, layer.in_features)
    check(
        layer, lambda: loss_of(layer(x), 6), max_dim=6, method=method, weight_sharing=weight_sharing
    )


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_diagonal_factors_of_convolutions(method):
    layer, x = nn.Conv2d(4, 12, 3, groups=2), torch.randn(5, 4, 5, 5)
    kfac = check(layer, lambda: loss_of(layer(x), 5), max_dim=5, method=method)
    assert factors_of(kfac)[""]["A"].shape == (2, 19)


def test_a_frozen_bias_is_a_constant():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Conv1d(3, 2, 1)), torch.randn(6, 3, 4)
    model[0].bias.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    check(model, lambda: loss_of(model[2](model[0](x).tanh().mT), 6))
    assert model[0].bias.grad is None


def test_skip_patterns_are_searched_in_names_and_class_names():
    model = nn.ModuleDict(
        {
            "stem": nn.Conv2d(1, 2, 3),
            "blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
            "norm": nn.LayerNorm(2),
            "tokens": nn.Embedding(3, 2),
        }
    )

    def covered(**options):
        return [x.name for x in kfac_of(model, **options).report().layers]

    everything = ["stem", "blocks.0", "blocks.1", "norm", "tokens"]
    assert covered(skip=[]) == everything
    assert covered(skip=["^Linear$"]) == ["stem", "norm", "tokens"]
    assert covered(skip=[r"blocks\.1", "Conv"]) == ["blocks.0", "norm", "tokens"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert [x.name for x in KFAC(model, optimizer).report().layers] == everything[:3]


# a layer type of the user's own


class ScaledLinear(nn.Module):
    """y = s W x, s fixed; W is what is learned."""

    def __init__(self, inputs, outputs, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.scale = scale

    def forward(self, x):
        return self.scale * (x @ self.weight.T)


class ScaledLinearLayer(Layer):
    """As y = W a with a = s x."""

    def rows(self, x, g):
        a = self.modules[0].scale * x
        # [groups = 1, samples, shared positions, size]
        return a.reshape(1, len(a), -1, a.shape[-1]), g.reshape(1, len(g), -1, g.shape[-1])


@BOTH
@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
@pytest.mark.parametrize("max_dim", [100, 3])
def test_a_layer_type_of_the_users_own(method, weight_sharing, max_dim):
    own, same = ScaledLinear(4, 3, scale=2.5), nn.Linear(4, 3, bias=False)
    same.weight.data = own.weight.detach().clone()
    x, types = torch.randn(6, 5, 4), {ScaledLinear: ScaledLinearLayer}
    options = {"method": method, "weight_sharing": weight_sharing, "max_dim": max_dim}
    kfacs = [kfac_of(own, layer_types=types, **options), kfac_of(same, **options)]
    loss_of(own(x), 6).backward()
    loss_of(same(2.5 * x), 6).backward()
    for kfac in kfacs:
        kfac.step()
    assert_same(factors_of(kfacs[0]), factors_of(kfacs[1]))
    assert_close(own.weight.grad, same.weight.grad)


class Kernel(nn.Module):
    """y = K x."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return x @ self.kernel.T

    @property
    def weight(self):
        return self.kernel.T


class KernelLayer(LinearLayer):
    def __init__(self, name, module, max_dim):
        super().__init__(name, module, max_dim, "kernel", "offset")


def test_a_layer_type_whose_weight_has_another_name():
    model, types = nn.Sequential(Kernel(), nn.Linear(3, 2)), {Kernel: KernelLayer}
    assert [x.name for x in kfac_of(model, layer_types=types).report().layers] == ["0", "1"]
    model[0].kernel.requires_grad_(False)
    report = kfac_of(copy.deepcopy(model), layer_types=types).report()
    assert [(x.name, x.reason) for x in report.skipped] == [("0", "weight is frozen")]


def test_a_layer_type_for_attention():
    class Mine(nn.MultiheadAttention):
        pass

    class MineLayer(LinearLayer):
        def __init__(self, name, module, max_dim):
            super().__init__(name, module, max_dim, "in_proj_weight", "in_proj_bias")

    layers = kfac_of(nn.Sequential(Mine(4, 2)), layer_types={Mine: MineLayer}).report().layers
    assert [type(layer) for layer in layers if layer.name == "0"] == [MineLayer]


def test_a_layer_type_may_stand_for_a_known_one_or_a_subclass():
    class Mine(nn.Linear):
        pass

    class MineLayer(LinearLayer):
        pass

    model = nn.Sequential(Mine(3, 3), nn.Linear(3, 3))
    kinds = [type(x) for x in kfac_of(model, layer_types={Mine: MineLayer}).report().layers]
    assert kinds == [MineLayer, LinearLayer]
    assert [type(x) for x in kfac_of(model).report().layers] == [LinearLayer, LinearLayer]
