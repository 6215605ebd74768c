"""The many ways to use a model: K-FAC sees each call once, and lets nothing crash."""

import copy
import gc
import io

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kfac_bench.core.capture.calls import SeenCall
from kfac_bench.core.capture.examples import Examples
from tests.support import oracle
from tests.support.layer_checks import (
    BOTH,
    Net,
    assert_close,
    assert_same,
    factors_of,
    grads_of,
    kfac_of,
    loss_of,
    train,
)

pytestmark = pytest.mark.usefixtures("double")


def test_a_layer_used_only_every_other_step():
    """It keeps its factors while it is not used, and weighs only what it saw."""
    model = nn.Sequential(Net())
    recorder = oracle.Calls([model[0].extra])
    kfac = kfac_of(model, factor_decay=0.7)
    for step in range(5):
        model.zero_grad()
        x = torch.randn(6, 4)
        loss_of(model[0](x, extra=step % 2 == 0), 6).backward()
        kfac.step()
        assert (model[0].extra.weight.grad is None) == (step % 2 == 1)
        if step == 3:
            before = factors_of(kfac)["0.extra"]
    fresh = [
        oracle.layer_factors([oracle.layer_rows(model[0].extra, *call)])
        for call in recorder.calls[model[0].extra]
    ]
    weights = [0.7**2, 0.7, 1.0]
    for i, key in enumerate("AG"):
        want = sum(w * f[i] for w, f in zip(weights, fresh, strict=True)) / sum(weights)
        assert_close(factors_of(kfac)["0.extra"][key], want)
        assert not torch.equal(before[key], want)


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
@BOTH
def test_a_layer_never_used_does_not_matter(method, weight_sharing):
    one, other = Net(), Net()
    other.load_state_dict(one.state_dict())
    del other.extra
    got, want = (train(m, method=method, weight_sharing=weight_sharing) for m in (one, other))
    del got["factors"]["extra"]
    for grads in got["grads"].values():
        assert grads.pop("extra.weight") is None
        assert grads.pop("extra.bias") is None
    assert_same(got, want)


def test_a_layer_frozen_later_leaves_the_others_alone():
    one, other = Net(), Net()
    other.load_state_dict(one.state_dict())
    kfacs = [kfac_of(m) for m in (one, other)]
    for m in (one, other):
        train(m, kfac=kfacs[(one, other).index(m)])
    one.second.requires_grad_(False)
    got, want = (train(m, 1, kfac=k) for m, k in zip((one, other), kfacs, strict=True))
    for name in ("second.weight", "second.bias"):
        assert got["grads"]["0"].pop(name) is None
        want["grads"]["0"].pop(name)
    assert_same(got["grads"], want["grads"])


def test_a_forward_without_gradients_counts_nothing():
    one, other = Net(), Net()
    other.load_state_dict(one.state_dict())

    def run(x):
        with torch.no_grad():
            one.first(x)  # in training mode
            one(torch.randn(2, 4))
        with torch.inference_mode():
            one(torch.randn(2, 4))
        one(torch.randn(2, 4))  # no backward
        return one(x)

    assert_same(train(one, run=run), train(other))


def test_keyword_arguments():
    class Keyword(Net):
        def forward(self, x):
            h = self.second(input=self.first(input=x).tanh())
            return self.last(input=h.tanh())

    one, other = Keyword(), Net()
    other.load_state_dict(one.state_dict())
    assert_same(train(one), train(other))


class InPlace(Net):
    """Everything between the layers in place, or not."""

    def __init__(self, act, in_place):
        super().__init__()
        self.act, self.in_place = act, in_place

    def forward(self, x):
        if not self.in_place:
            h = self.second(self.first(x).relu())
            h = torch.cat([h[..., :2].relu(), h[..., 2:]], -1)
            return self.last(h) * 2
        h = self.second(self.first(x).relu_())
        h[..., :2].relu_()
        return self.last(h).mul_(2)


@pytest.mark.parametrize("shape", [(6, 5, 4), (6, 2, 5, 4), (6, 4), (4,)])
@pytest.mark.parametrize("bias", [True, False])
def test_in_place_operations_after_layers(shape, bias):
    one, other = InPlace(None, True), InPlace(None, False)
    for model in (one, other):
        for layer in (model.first, model.second, model.last):
            layer.bias = layer.bias if bias else None
    other.load_state_dict(one.state_dict())
    x, results = torch.randn(shape), []
    for model in (one, other):
        kfac = kfac_of(model)
        loss_of(model(x), 6).backward()
        kfac.step()
        results.append({"f": factors_of(kfac), "g": grads_of(model)})
    assert_same(*results)
    assert not torch.equal(results[0]["f"]["first"]["G"][0], torch.eye(6))


@pytest.mark.parametrize("shape", [(5, 2, 6, 6), (2, 6, 6)])
def test_in_place_operations_after_convolutions_and_norms(shape):
    def make(in_place):
        return nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.ReLU(in_place),
            nn.GroupNorm(2, 4) if len(shape) == 4 else nn.Softplus(),
            nn.ReLU(in_place),
            nn.Conv2d(4, 3, 3),
            nn.Hardtanh(inplace=in_place),
        )

    one, other, x = make(True), make(False), torch.randn(shape)
    other.load_state_dict(one.state_dict())
    assert_same(*(train(m, 2, run=lambda _, m=m: m(x)) for m in (one, other)))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (5, 3, 6, 6)),
        (lambda: nn.Conv1d(3, 4, 2, padding="same"), (5, 3, 6)),
        (lambda: nn.Linear(3, 4), (5, 3, 6)),
        (lambda: nn.Linear(3, 4, bias=False), (5, 3, 6)),
    ],
    ids=["circular", "same", "linear", "without_bias"],
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_an_input_that_changes_in_place_after_a_layer_that_copies_it(make, shape):
    """Autograd does not complain, because torch has computed with the copy."""
    results = []
    for change in (torch.Tensor.add, torch.Tensor.add_):
        torch.manual_seed(0)
        model, x = nn.ModuleList([make()]), torch.randn(shape)
        x = x.mT if isinstance(model[0], nn.Linear) else x
        kfac = kfac_of(model)
        (loss_of(model[0](x), 5) + change(x, 3.0).mean()).backward()
        kfac.step()
        results.append({"f": factors_of(kfac), "g": grads_of(model)})
    assert_same(*results)


class Checkpointed(Net):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)

    def block(self, h):
        h = self.second(h.tanh()).relu_()
        return self.attention(*3 * [self.norm(h)])[0]

    def forward(self, x):
        h = self.first(x)
        if self.use_reentrant is None:
            return self.last(self.block(h))
        return self.last(checkpoint(self.block, h, use_reentrant=self.use_reentrant))


@BOTH
@pytest.mark.parametrize("method", ["eigen", "ekfac"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_counts_once(use_reentrant, method, weight_sharing):
    one, other = Checkpointed(use_reentrant), Checkpointed(None)
    other.load_state_dict(one.state_dict())
    got, want = (train(m, method=method, weight_sharing=weight_sharing) for m in (one, other))
    assert_same(got, want)


class Looped(nn.Module):
    """A block that is used three times, each time in a checkpoint of its own."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        h = self.first(x)
        for _ in range(3):
            if self.use_reentrant is None:
                h = self.block(h).tanh()
            else:
                h = checkpoint(lambda h: self.block(h).tanh(), h, use_reentrant=self.use_reentrant)
        return self.last(h)


@BOTH
@pytest.mark.parametrize("method", ["eigen", "ekfac"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_of_one_layer_are_calls_of_one_forward(use_reentrant, method, weight_sharing):
    """Two forwards have one backward here, so each segment belongs to the right one of them."""
    one, other = Looped(use_reentrant), Looped(None)
    other.load_state_dict(one.state_dict())
    x, results = torch.randn(2, 6, 4), []
    for model in (one, other):
        kfac = kfac_of(model, method=method, weight_sharing=weight_sharing)
        for _ in range(2):
            model.zero_grad()
            with torch.no_grad():  # nothing repeats this call
                model.block(torch.zeros(6, 6))
            loss = loss_of(model(x[0]), 6) + loss_of(model(x[1]), 6)
            with torch.no_grad():  # nor this forward, which has other examples
                model(x[0][:1])
            loss.backward()
            kfac.step()
        results.append({"f": factors_of(kfac), "g": grads_of(model)})
    assert_same(*results)


def test_checkpointing_after_an_interrupted_forward():
    def interrupt(module, inputs, output):
        raise KeyboardInterrupt

    one, other = Checkpointed(False), Checkpointed(None)
    other.load_state_dict(one.state_dict())
    kfac, x = kfac_of(one), torch.randn(6, 5, 4)
    handle = one.attention.register_forward_hook(interrupt, prepend=True)
    with pytest.raises(KeyboardInterrupt):
        one(x)
    handle.remove()
    kfac.detach()
    assert_same(train(one), train(other))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_statistics_bring_no_further_recomputation(use_reentrant):
    model, forwards = Checkpointed(use_reentrant), []
    model.second.register_forward_hook(lambda *args: forwards.append(1))
    kfac_of(model)
    output = model(torch.randn(6, 5, 4))
    assert len(forwards) == 1
    loss_of(output, 6).backward()
    assert len(forwards) == 2


def test_activation_checkpointing_with_the_exact_fisher():
    one, other = Checkpointed(False), Checkpointed(None)
    other.load_state_dict(one.state_dict())
    results, x = [], torch.randn(6, 5, 4)
    for model in (one, other):
        kfac = kfac_of(model, fisher="type2")
        output = model(x).sum(1)
        kfac.fisher_backward(output)
        F.cross_entropy(output, torch.arange(6) % 3).backward()
        kfac.step()
        results.append({"f": factors_of(kfac), "g": grads_of(model)})
    assert_same(*results)


@BOTH
@pytest.mark.parametrize("fisher", ["empirical", "type2"])
def test_a_model_whose_own_forward_is_never_called(fisher, weight_sharing):
    """With gradient accumulation: micro-batches are told apart by their backward."""
    one = nn.ModuleDict({"body": nn.Linear(4, 6), "head": nn.Linear(6, 3)})
    other = nn.Sequential(*one.values(), nn.Identity())
    other = copy.deepcopy(other)
    x, y = torch.randn(9, 5, 4), torch.randint(3, (9,))
    options = {"fisher": fisher, "weight_sharing": weight_sharing}
    kfacs = [kfac_of(m, **options) for m in (one, other)]

    def run(forward, kfac, part):
        output = forward(x[part]).sum(1)
        kfac.fisher_backward(output)
        (F.cross_entropy(output, y[part], reduction="sum") / 9).backward()

    for part in (slice(0, 4), slice(4, 8), slice(8, 9)):
        run(lambda x: one["head"](one["body"](x)), kfacs[0], part)
    run(other, kfacs[1], slice(0, 9))
    for kfac in kfacs:
        kfac.step()
    factors = factors_of(kfacs[1])
    assert_same(factors_of(kfacs[0]), {"body": factors["0"], "head": factors["1"]})
    assert_close(one["body"].weight.grad, other[0].weight.grad)


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
def test_no_cycle_holds_activations(fisher):
    """What a forward kept is freed with its graph, not by Python's garbage collection."""
    model = nn.ModuleList([Net(), nn.MultiheadAttention(3, 1, batch_first=True)])
    kfac = kfac_of(model, fisher=fisher)

    def count():
        return sum(type(x) is SeenCall for x in gc.get_objects())

    gc.collect()
    gc.disable()
    before = count()  # other tests of this process may have left some
    try:
        for with_backward in (True, False):
            out = model[0](torch.randn(6, 5, 4)).relu_()
            out = model[1](out, out, out)[0]
            loss = out.sum()
            assert count() > before
            if with_backward:
                kfac.fisher_backward(out)
                loss.backward()
                kfac.step()
            del out, loss
            assert count() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [nn.Linear, "conv", nn.LSTM])
@pytest.mark.parametrize("fisher", ["empirical", "mc"])
def test_a_loss_that_is_kept_holds_no_activations(kind, fisher):
    """A backward that frees the graph frees the inputs, though the nodes of the graph live on."""
    layer = nn.Conv1d(4, 4, 1) if kind == "conv" else kind(4, 4)
    model = nn.ModuleList([nn.Linear(4, 4), layer])
    kfac = kfac_of(model, fisher=fisher)
    gc.collect()
    before = {id(x) for x in gc.get_objects() if type(x) is SeenCall}  # of other tests

    def held():
        seen = [x for x in gc.get_objects() if type(x) is SeenCall and id(x) not in before]
        return [call for call in seen if call.x is not None]

    out = model[1](model[0](torch.randn(4, 4)).tanh())
    out = out[0] if isinstance(out, tuple) else out
    loss = out.square().sum()
    assert len(held()) >= 2
    kfac.fisher_backward(out, "gaussian")
    loss.backward()
    del out
    assert held() == []
    kfac.step()
    assert loss.item() > 0


@pytest.mark.parametrize("frozen", [False, True], ids=["no_grad", "frozen"])
def test_forwards_without_a_step_leave_nothing_in_memory(frozen):
    """As in rollouts, and while the script trains other parameters alone."""
    model, scale = nn.Sequential(nn.Linear(4, 3)), nn.Parameter(torch.ones(()))
    kfac = kfac_of(model)
    model.requires_grad_(not frozen)
    before = {id(x) for x in gc.get_objects() if type(x) is Examples}  # of other tests
    for _ in range(5):
        with torch.set_grad_enabled(frozen):
            loss = (scale * model(torch.randn(6, 4))).sum()
        if frozen:
            loss.backward()
    assert [x for x in gc.get_objects() if type(x) is Examples and id(x) not in before] == []
    assert kfac.steps == 0


def test_a_graph_that_is_kept_keeps_the_inputs():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    kfac, x = kfac_of(model), torch.randn(6, 4)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    kfac.step()
    factors = factors_of(kfac)
    other = copy.deepcopy(model)
    other.zero_grad()
    again = kfac_of(other)
    (2 * other(x).square().sum()).backward()
    again.step()
    assert_close(factors["2"]["A"], factors_of(again)["2"]["A"])


def test_parameters_of_others_in_functional_call_count_nothing():
    """Their gradients do not reach ``.grad`` of the layers."""
    model, (x, other) = Net(), torch.randn(2, 6, 4)
    foreign = {name: nn.Parameter(torch.randn_like(p)) for name, p in model.named_parameters()}
    kfac = kfac_of(model)
    loss_of(torch.func.functional_call(model, foreign, (10 * other,)), 6).backward()
    loss_of(model(x), 6).backward()
    kfac.step()
    plain = Net()
    plain.load_state_dict(model.state_dict())
    alone = kfac_of(plain)
    loss_of(plain(x), 6).backward()
    alone.step()
    assert_same(factors_of(kfac), factors_of(alone))


def test_forwards_in_eval_mode_leave_nothing():
    model = Net().eval()
    kfac = kfac_of(model)
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(6, 4))
    assert not kfac._capture._examples


def test_a_convolution_whose_padding_and_dilation_change_later():
    found = []
    for later in (False, True):
        torch.manual_seed(0)
        conv = nn.Conv2d(2, 3, 3, padding=1) if later else nn.Conv2d(2, 3, 3, 1, 2, 2)
        model = nn.Sequential(conv, nn.Flatten(), nn.Linear(75, 3))
        conv.padding, conv.dilation = (2, 2), 2
        kfac = kfac_of(model)
        loss_of(model(torch.randn(6, 2, 5, 5)), 6).backward()
        kfac.step()
        found.append(factors_of(kfac))
    assert_same(*found)


def test_copies_and_saved_models_have_no_active_hook():
    model = Net()
    kfac, x = kfac_of(model), torch.randn(6, 4)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        loss_of(copied(x), 6).backward()
        assert not kfac._capture._moments._collected
        for hook in copied.first._forward_hooks.values():
            assert "kfac_bench.core.capture.safe_hooks" in hook.__module__
            assert hook.__name__ == "no_hook"
        again = kfac_of(copied)  # a preconditioner of its own
        copied.zero_grad()
        loss_of(copied(x), 6).backward()
        again.step()
        assert not kfac._capture._moments._collected
        again.detach()
    loss_of(model(x), 6).backward()
    kfac.step()
    assert_same(grads_of(model), grads_of(copied))


def test_detach_takes_every_hook_off():
    model = nn.Sequential(Net(), nn.MultiheadAttention(6, 2))
    kfac = kfac_of(model)
    kfac.detach()
    kfac.detach()  # twice is once
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    loss_of(model[0](torch.randn(6, 4)), 6).backward()
    with pytest.raises(RuntimeError, match="after detach"):
        kfac.step()


def test_a_double_model_with_float32_as_the_default_dtype():
    """Nothing takes its dtype from the default."""
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Flatten(0, 1), nn.BatchNorm1d(4)
    )
    model.unused = nn.Linear(4, 4)
    x = torch.randint(5, (6, 3))
    for method in ("eigen", "inverse", "ekfac"):
        for weight_sharing in ("expand", "reduce"):
            results = []
            for default in (torch.float64, torch.float32):
                one = copy.deepcopy(model)
                torch.set_default_dtype(default)
                kfac = kfac_of(one, method=method, weight_sharing=weight_sharing)
                for _ in range(2):
                    one.zero_grad()
                    loss_of(nn.Sequential.forward(nn.Sequential(*list(one)[:5]), x), 6).backward()
                    kfac.step()
                torch.set_default_dtype(torch.float64)
                factors = factors_of(kfac)
                del factors["unused"]
                results.append({"f": factors, "g": grads_of(one)})
            assert_same(*results)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_layer_with_nested_tensors_is_left_to_the_optimizer(layout):
    class Ragged(nn.Module):
        def __init__(self):
            super().__init__()
            self.each, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, parts):
            nested = torch.nested.as_nested_tensor(list(parts), layout=layout)
            return self.head(self.each(nested).to_padded_tensor(0.0).sum(1))

    model = Ragged()
    kfac = kfac_of(model)
    parts = torch.randn(2, 4), torch.randn(5, 4), torch.randn(1, 4)
    with pytest.warns(UserWarning, match=r"layer 'each' got a nested tensor.*left to the opt"):
        model(parts).square().mean().backward()
    model.zero_grad()
    model(parts).square().mean().backward()
    before = model.each.weight.grad.clone(), model.head.weight.grad.clone()
    kfac.step()
    # The limit of the step shrinks all layers.
    pairs = zip((model.each, model.head), before, strict=True)
    cosines = [F.cosine_similarity(m.weight.grad.flatten(), g.flatten(), 0) for m, g in pairs]
    assert cosines[0] == pytest.approx(1, abs=1e-12)
    assert cosines[1] < 0.999
    kfac.detach()
