"""K-FAC compares its statistics with the gradients, and leaves layers that differ to the optimizer.

Warnings are errors in this suite, so each test without ``pytest.warns`` also shows that a right
script gets none.
"""

import copy
import re
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune

from kfac_bench import KFAC, eigen_adam
from kfac_bench.core.distributed.dtensor import full
from kfac_bench.core.guards.statistics import MOST_UNCLEAR
from kfac_bench.core.layers.linear import LinearLayer
from tests.support.distributed import run_ranks

OPTIONS = {"damping": 0.03, "update_freq": 1, "factor_update_freq": 1}


def batch(n=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(n, 1, 4, 4, generator=generator),
        torch.randint(3, (n,), generator=generator),
    )


def network(kind=nn.Linear, conv=nn.Conv2d):
    torch.manual_seed(0)
    return nn.Sequential(
        conv(1, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), kind(64, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def kfac_of(model, **options):
    return KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), **(OPTIONS | options))


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def backward(model, *, scale=1.0, **options):
    x, y = batch(**options)
    (scale * F.cross_entropy(model(x), y)).backward()


def trained():
    """Return a model after three steps, and its KFAC, which compares the layers no more."""
    model = network()
    kfac = kfac_of(model)
    for _ in range(3):
        model.zero_grad()
        backward(model)
        kfac.step()
    return model, kfac


# ---- another forward than the layer class describes ----


class Activation(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


class Mask(nn.Linear):
    def forward(self, x):
        mask = torch.arange(self.weight.numel()).view_as(self.weight) % 3 > 0
        return F.linear(x, self.weight * mask, self.bias)


class Whitened(nn.Linear):
    def forward(self, x):
        return super().forward(F.layer_norm(x, x.shape[1:]) * 3)


class Scaled(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * 0.5, self.bias)


class Standardized(nn.Conv2d):
    def forward(self, x):
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, w, self.bias, padding=1)


class ScaledInput(nn.Conv2d):
    def forward(self, x):
        return super().forward(2 * x)


WRONG = {
    "activation": ("3", {"kind": Activation}),
    "mask": ("3", {"kind": Mask}),
    "normalized input": ("3", {"kind": Whitened}),
    "scale": ("3", {"kind": Scaled}),
    "standardized convolution": ("0", {"conv": Standardized}),
    "scaled input of a convolution": ("0", {"conv": ScaledInput}),
}


@pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])
@pytest.mark.parametrize("case", WRONG)
def test_a_layer_with_another_forward_goes_to_the_optimizer(case, weight_sharing):
    name, kinds = WRONG[case]
    model = network(**kinds)
    other = copy.deepcopy(model)
    kfac = kfac_of(model, weight_sharing=weight_sharing)
    without = kfac_of(other, weight_sharing=weight_sharing, skip=[f"^{name}$"])
    for step in range(3):
        for each in (model, other):
            each.zero_grad()
            backward(each, seed=step)
        raw = gradients(model)
        if step:
            kfac.step()
        else:
            with pytest.warns(UserWarning, match=rf"layer '{name}' .*differ by .*Add it to skip"):
                kfac.step()
        without.step()
        assert torch.equal(model[int(name)].weight.grad, raw[f"{name}.weight"])
        assert not torch.allclose(model[5].weight.grad, raw["5.weight"], rtol=0.1)
        for p, wanted in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, wanted.grad)


class TakesList(nn.Linear):
    def forward(self, x):
        return super().forward(x[0] if isinstance(x, list) else x)


class Flattens(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1))


class Reshapes(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(len(x), 2, 4)


class TakesPart(nn.Linear):
    def forward(self, x):
        return super().forward(x[:, :64])


class TakesOneHot(nn.Embedding):
    def forward(self, x):
        return x @ self.weight


class Pads(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.pad(x, (1, 1, 1, 1)))


class ChannelsLast(nn.Conv2d):
    def forward(self, x):
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class ChannelsLastTransposed(nn.ConvTranspose1d):
    def forward(self, x):
        return super().forward(x.mT).mT


UNREAD = {
    "list": (TakesList(64, 8), lambda x: [x.flatten(1)]),
    "flattens": (Flattens(64, 8), lambda x: x.view(-1, 8, 8)),
    "reshapes": (Reshapes(64, 8), lambda x: x.flatten(1)),
    "part of the input": (TakesPart(64, 8), lambda x: x.view(-1, 64).repeat(1, 2)),
    "sparse": (nn.Linear(64, 8), lambda x: x.flatten(1).to_sparse()),
    "one-hot rows": (TakesOneHot(64, 8), lambda x: x.flatten(1)),
    "padding": (Pads(1, 4, 3), lambda x: x.view(-1, 1, 8, 8)),
    "channels last": (ChannelsLast(4, 4, 2), lambda x: x.view(-1, 4, 4, 4)),
    "transposed": (ChannelsLastTransposed(4, 2, 2), lambda x: x.view(-1, 16, 4)),
}


@pytest.mark.parametrize("case", UNREAD)
def test_a_layer_whose_inputs_cannot_be_read_is_left_out(case):
    """Nothing crashes, and the other layers are those of a KFAC that skips the layer."""
    layer, prepare = UNREAD[case]
    results = []
    for options in ({}, {"skip": ["layer"]}):
        torch.manual_seed(0)
        model = nn.ModuleDict({"layer": copy.deepcopy(layer), "head": nn.LazyLinear(3)})
        x, y = torch.randn(16, 64), batch()[1]
        model["head"](model["layer"](prepare(x)).flatten(1))
        kfac = kfac_of(model, **{"skip": [], "trust_ratio": None} | options)
        for step in range(2):
            model.zero_grad()
            unread = r"layer 'layer' .*which K-FAC cannot read.*left to the optimizer"
            with nullcontext() if step or options else pytest.warns(UserWarning, match=unread):
                h = model["layer"](prepare(x)).flatten(1)
            F.cross_entropy(model["head"](h), y).backward()
            kfac.step()
        results.append(gradients(model))
    for name, got in results[0].items():
        torch.testing.assert_close(got, results[1][name])


@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_the_gradient_of_such_a_layer_stays_as_it_is(method):
    """Also without grafting, and although A and G of the layer count as identities."""
    model = nn.Sequential(nn.Unflatten(1, (8, 8)), Flattens(64, 8), nn.Linear(8, 3))
    kfac = kfac_of(model, method=method, grafting=False, trust_ratio=None)
    with pytest.warns(UserWarning, match="K-FAC cannot read"):
        F.cross_entropy(model(torch.randn(16, 64)), batch()[1]).backward()
    raw = gradients(model)
    kfac.step()
    assert torch.equal(model[1].weight.grad, raw["1.weight"])
    assert not torch.allclose(model[2].weight.grad, raw["2.weight"], rtol=0.1)
    assert "K-FAC cannot read its inputs or outputs" in str(kfac.report())


def test_eigen_adam_trains_such_a_layer_as_adamw():
    model = network(Activation)
    other = copy.deepcopy(model)
    optimizer, plain = eigen_adam(model, lr=0.01), torch.optim.AdamW(other.parameters(), lr=0.01)
    backward(model)
    with pytest.warns(UserWarning, match="layer '3'"):
        optimizer.step()
    other[3].weight.grad = model[3].weight.grad.clone()
    plain.param_groups[0]["weight_decay"] = optimizer.param_groups[0]["weight_decay"]
    plain.param_groups[0]["betas"] = optimizer.param_groups[0]["betas"]
    plain.step()
    torch.testing.assert_close(model[3].weight, other[3].weight)


def test_a_weight_that_is_also_used_elsewhere():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.hidden = nn.Embedding(7, 6), nn.Linear(6, 6)

        def forward(self, x):
            return F.linear(self.hidden(self.tokens(x)), self.tokens.weight)

    model, x = Tied(), torch.arange(14).view(7, 2) % 7
    kfac = kfac_of(model, skip=[])
    F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    with pytest.warns(UserWarning, match=r"layer 'tokens' \(Embedding\).*used elsewhere"):
        kfac.step()


def test_a_new_forward_is_noticed_after_a_change_of_the_model():
    """The layers were compared before. Then one of them got another class, and others changed."""
    model, kfac = trained()
    assert not kfac._capture.identity.due
    model[3].__class__ = Activation
    model[0].bias.requires_grad_(False)
    for is_compared in (False, True):
        model.zero_grad()
        backward(model)
        with pytest.warns(UserWarning, match="layer '3'") if is_compared else nullcontext():
            kfac.step()


def test_a_layer_class_without_rows_is_not_compared():
    class OnlyMoments(LinearLayer):
        def rows(self, x, g):
            raise NotImplementedError

    class Mine(nn.Linear):
        pass

    model = network(Mine)
    kfac = kfac_of(model, layer_types={Mine: OnlyMoments})
    backward(model)
    kfac.step()
    assert float(kfac.state_dict()["layers"]["3"]["G"]["weight"]) == 1.0


# ---- right scripts ----


def micro_batches(model, kfac):
    for n in (1, 10, 5):
        backward(model, n=n, seed=n, scale=n / 16)


def gradient_of_one_part_twice(model, kfac):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    (0.1 * loss).backward()


def penalty(model, kfac, power=2, size=0.3):
    x, y = batch()
    norms = sum(p.abs().pow(power).sum() for p in model.parameters())
    (F.cross_entropy(model(x), y) + size * norms).backward()


def two_penalties(model, kfac):
    penalty(model, kfac, 1)
    penalty(model, kfac)


def masked_gradient(model, kfac):
    handle = model[3].weight.register_hook(lambda g: g * (torch.arange(64) % 2))
    backward(model)
    handle.remove()


def gradient_penalty(model, kfac):
    x, y = batch()
    x.requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (F.cross_entropy(output, y) + 10 * gradient.square().sum()).backward()


def part_in_pause(model, kfac):
    x, y = batch()
    with kfac.pause():
        other = model(x + 1)
    (F.cross_entropy(model(x), y) + 3 * F.cross_entropy(other, y)).backward()


def all_in_pause(model, kfac):
    with kfac.pause():
        backward(model)


def part_in_eval_mode(model, kfac):
    x, y = batch()
    other = model.eval()(x + 1)
    (F.cross_entropy(model.train()(x), y) + 3 * F.cross_entropy(other, y)).backward()


def clipped(model, kfac):
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def in_bfloat16(model, kfac):
    with torch.autocast("cpu", torch.bfloat16):
        backward(model)


def failed_backward(model, kfac):
    """It fails between two calls of a layer. As DistributedDataParallel, the script keeps nodes."""

    def fail(grad):
        raise ZeroDivisionError

    nodes = [get_gradient_edge(p).node for p in model.parameters()]
    x, y = batch(seed=1)
    h = model[:4](x)
    h.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        F.cross_entropy(model[3:](h.repeat(1, 8)), y).backward()
    model.zero_grad()
    backward(model)
    assert nodes


RIGHT = {
    function.__name__: function
    for function in (
        micro_batches,
        gradient_of_one_part_twice,
        penalty,
        two_penalties,
        masked_gradient,
        gradient_penalty,
        part_in_pause,
        all_in_pause,
        part_in_eval_mode,
        clipped,
        in_bfloat16,
        failed_backward,
    )
} | {"L1 penalty": partial(penalty, power=1)}


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_script_is_silent(case):
    model = network()
    kfac = kfac_of(model)
    for _ in range(3):
        model.zero_grad()
        RIGHT[case](model, kfac)
        kfac.step()
    assert not kfac._executor.gradients.left


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_gradient_of_rounding_errors_proves_nothing(dtype):
    """A layer with constant inputs before a batch norm: its output gradients sum to zero."""
    torch.manual_seed(0)
    layer, norm = nn.Linear(64, 8), nn.BatchNorm1d(8)
    kfac = kfac_of(nn.ModuleList([layer, norm]))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        h = layer(torch.linspace(-1, 1, 64).expand(512, 64))
    loss = F.cross_entropy(norm(h.float() + torch.randn(512, 8)), torch.randint(8, (512,)))
    loss.backward()
    assert layer.weight.grad.norm() < 1e-2
    kfac.step()


def test_a_comparison_that_stays_unclear_ends():
    """The gradient of many rows with random labels: in half precision it could be rounding."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    kfac = kfac_of(model)
    check = kfac._guards.statistics
    for step in range(MOST_UNCLEAR):
        assert check._identity.due == {""}, step
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.randn(30000, 8))
        F.cross_entropy(output, torch.randint(3, (30000,))).backward()
        kfac.step()
    assert check._passed == {"": 0}
    assert not check._identity.due


def test_layers_are_compared_once_between_two_decompositions(monkeypatch):
    """A comparison takes as long as a gradient, and only decompositions judge it."""
    compared = []
    monkeypatch.setattr(
        LinearLayer,
        "gradient",
        lambda self, x, g, gradient=LinearLayer.gradient: (
            compared.append(kfac.steps) or gradient(self, x, g)
        ),
    )
    model = nn.Linear(8, 3)
    kfac = kfac_of(model, update_freq=4, early_updates=False)
    for _ in range(12):
        model.zero_grad()
        for _ in range(2):
            F.cross_entropy(model(torch.randn(4, 8)), torch.randint(3, (4,))).backward()
        kfac.step()
    assert compared == [0, 0, 1, 1]
    assert not kfac._capture.identity.due


# ---- gradients that torch.autograd.grad returns ----


def assigned(model, factor=1.0, parts=1):
    x, y = batch()
    total = None
    for some_x, some_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
        loss = F.cross_entropy(model(some_x), some_y) / parts
        grads = torch.autograd.grad(loss, [*model.parameters()])
        total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
    for p, grad in zip(model.parameters(), total, strict=True):
        p.grad = factor * grad


@pytest.mark.parametrize("options", [{}, {"background": True}, {"method": "ekfac"}])
@pytest.mark.parametrize("parts", [1, 2])
def test_gradients_assigned_by_hand_have_statistics(options, parts):
    one, other = network(), network()
    kfacs = [kfac_of(model, **options) for model in (one, other)]
    for _ in range(2):
        assigned(one, parts=parts)
        other.zero_grad()
        for x, y in zip(*(t.chunk(parts) for t in batch()), strict=True):
            (F.cross_entropy(other(x), y) / parts).backward()
        for kfac in kfacs:
            kfac.step()
    got, wanted = (kfac.state_dict()["layers"] for kfac in kfacs)
    for name in wanted:
        for factor in "AG":
            assert float(got[name][factor]["weight"]) == float(wanted[name][factor]["weight"])
            torch.testing.assert_close(got[name][factor]["factor"], wanted[name][factor]["factor"])


def test_a_clip_of_assigned_gradients_does_not_matter():
    model = network()
    kfac = kfac_of(model)
    assigned(model, factor=1e-3)
    kfac.step()
    assert float(kfac.state_dict()["layers"]["3"]["G"]["weight"]) == 1.0


def test_a_backward_that_was_discarded_does_not_end_the_statistics_of_assigned_gradients():
    model = network()
    kfac = kfac_of(model)
    backward(model)
    model.zero_grad()
    weights = []
    for _ in range(3):
        assigned(model)
        kfac.step()
        model.zero_grad()
        weights.append(float(kfac.state_dict()["layers"]["3"]["G"]["weight"]))
    assert weights[0] < weights[1] < weights[2]


def test_assigned_gradients_of_something_else_have_no_statistics():
    model = network()
    kfac = kfac_of(model)
    assigned(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    with pytest.warns(UserWarning, match=r"layer '0' has a gradient, but .*\(3 of 3 layers\)"):
        kfac.step()
    assert float(kfac.state_dict()["layers"]["3"]["G"]["weight"]) == 0.0


# ---- gradients without statistics ----


def by_torch_func(model):
    x, y = batch()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights):
        return F.cross_entropy(functional_call(model, weights, x), y)

    for name, grad in torch.func.grad(loss)(weights).items():
        model.get_parameter(name).grad = grad


def by_products_of_weights(model):
    x, y = batch()
    h = F.conv2d(x, model[0].weight, padding=1).flatten(1)
    h = F.linear(h, model[3].weight, model[3].bias).tanh()
    F.cross_entropy(F.linear(h, model[5].weight), y).backward()


@pytest.mark.parametrize("other_pass", [by_torch_func, by_products_of_weights])
def test_gradients_without_statistics_are_named(other_pass):
    model = network()
    kfac = kfac_of(model)
    for seed in range(2):
        model.zero_grad()
        other_pass(model)
        if seed:
            kfac.step()
        else:
            with pytest.warns(UserWarning, match=r"layer '0' has a gradient, but.*3 of 3.* skip"):
                kfac.step()
    assert not kfac.report().layers
    assert {each.reason for each in kfac.report().skipped} == {"its gradient has no statistics"}
    model.zero_grad()
    backward(model)
    kfac.step()
    assert len(kfac.report().layers) == 3, "they have statistics now"


def test_a_layer_without_statistics_is_named_also_later():
    """Its statistics stop: the script uses the weight itself from now on."""
    model, kfac = trained()
    model.zero_grad()
    by_products_of_weights(model)
    with pytest.warns(UserWarning, match="has a gradient, but K-FAC saw no backward"):
        kfac.step()


@pytest.mark.parametrize("kind", ["prune", "parametrize", "weight norm"])
def test_a_layer_that_is_pruned_later_goes_to_the_optimizer(kind):
    class Half(nn.Module):
        def forward(self, weight):
            return weight / 2

    model = network()
    kfac = kfac_of(model)
    backward(model)
    kfac.step()
    if kind == "prune":
        prune.l1_unstructured(model[3], "weight", 0.5)
    elif kind == "weight norm":  # it replaces the parameter
        parametrizations.weight_norm(model[3])
    else:
        parametrize.register_parametrization(model[3], "weight", Half())
    for step in range(2):
        model.zero_grad()
        backward(model)
        raw = gradients(model)
        if step:
            kfac.step()
        else:
            with pytest.warns(UserWarning, match="weight of layer '3' is computed"):
                kfac.step()
        for name, p in model.named_parameters():
            assert torch.equal(p.grad, raw[name]) == name.startswith("3."), name


def test_a_layer_that_was_left_out_stays_so_after_loading():
    """Also in the steps until the layers are compared again, and in the report."""
    model = network(Activation)
    kfac = kfac_of(model)
    backward(model)
    with pytest.warns(UserWarning, match="layer '3'"):
        kfac.step()
    state = kfac.state_dict()
    assert state["left"] == ["3"]
    kfac.detach()
    kfac = kfac_of(model, factor_update_freq=10, update_freq=10, early_updates=False)
    kfac.load_state_dict(state)
    model.zero_grad()
    backward(model)
    raw = gradients(model)
    kfac.step()
    assert torch.equal(model[3].weight.grad, raw["3.weight"])
    report = kfac.report()
    assert [x.name for x in report.layers] == ["0", "5"]
    assert [(x.name, x.params) for x in report.skipped] == [("3", 64 * 8 + 8)]


# ---- several ranks ----


class Block(nn.Module):
    """A layer that scales its input, and a branch that only rank 0 uses."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle = nn.Linear(16, 8), kind(8, 8)
        self.branch, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.middle(self.first(x.flatten(1)).tanh()).tanh()
        if dist.get_rank() == 0:
            h = h + self.branch(h)
        return self.last(h)


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(2 * x)


class Unseen(nn.Linear):
    """A call of it runs no hooks."""

    __call__ = nn.Linear.forward


class TakesHalf(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs // 2, outputs)

    def forward(self, x):
        return super().forward(x.chunk(2, 1)[0])


def shard(model):
    for part in model.children():
        fully_shard(part)
    return fully_shard(model)


def on_ranks(kind, sharded, options, prunes=False):
    """Return the warnings of a rank, and which layers K-FAC leaves out."""
    bare = Block(kind)
    if sharded:
        bare.branch = nn.Identity()  # FSDP2 needs each layer on all ranks
    model = shard(bare) if sharded else DistributedDataParallel(bare, find_unused_parameters=True)
    kfac = kfac_of(model, **options)
    left = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            if prunes and not step:
                prune.identity(bare.middle, "weight")
            model.zero_grad()
            for i in range(2):
                seed = 10 * step + 2 * i + dist.get_rank()
                x, y = batch(seed=seed)
                with kfac.accumulate() if i == 0 else nullcontext():
                    (F.cross_entropy(model(x), y) / 2).backward()
            raw = {name: full(p.grad).clone() for name, p in bare.named_parameters()}
            kfac.step()
            same = {n for n, p in bare.named_parameters() if torch.allclose(full(p.grad), raw[n])}
            left.append(sorted(same))
    kfac.detach()
    return [str(w.message) for w in caught if "K-FAC" in str(w.message)], left


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sharded", "options"),
    [
        (False, {}),
        (False, {"strategy": "mem_opt"}),
        (False, {"overlap": True}),
        (True, {"strategy": "mem_opt"}),
    ],
)
def test_ranks_leave_out_the_same_layers(sharded, options):
    for kind, names in ((nn.Linear, []), (Doubled, ["middle.bias", "middle.weight"])):
        results = run_ranks(2, on_ranks, kind, sharded, options)
        assert [left for _, left in results] == [[names] * 3] * 2
        assert [len(texts) for texts, _ in results] == [bool(names), 0]


def assigned_on_rank():
    """Return the warnings of a rank, which cannot compare averages with its own sums."""
    model = network()
    kfac = kfac_of(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assigned(model, parts=2)
            kfac.step()
    kfac.detach()
    return [str(w.message) for w in caught]


@pytest.mark.ranks
def test_ranks_name_gradients_that_are_assigned_by_hand():
    (text,), none = run_ranks(2, assigned_on_rank)
    assert re.search(r"layer '0' has a gradient, but .*\(3 of 3 layers\)", text)
    assert none == []


@pytest.mark.ranks
@pytest.mark.parametrize("options", [{}, {"strategy": "mem_opt"}, {"overlap": True}], ids=str)
def test_ranks_agree_on_layers_without_statistics(options):
    options = options | {"trust_ratio": None}
    for kind, prunes, text, warned in (
        (Unseen, False, "layer 'middle' has a gradient, but", (1, 0)),
        (TakesHalf, False, "layer 'middle' .* which K-FAC cannot read", (1, 1)),
        (nn.Linear, True, "weight of layer 'middle' is computed", (1, 0)),
    ):
        results = run_ranks(2, on_ranks, kind, False, options, prunes)
        weight = "middle.weight_orig" if prunes else "middle.weight"
        for (texts, left), count in zip(results, warned, strict=True):
            assert left == [["middle.bias", weight]] * 3
            assert len(texts) == count
            assert all(re.search(text, each) for each in texts)
