"""Statistics of a pass go if its gradients are discarded, and stay if they are only changed."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_bench.core import KFAC
from tests.core.capture.test_counted_passes import FISHERS, Net, batch, training_pass
from tests.support.layer_checks import assert_same, factors_of, grads_of, kfac_of

pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().double()


def zero_by_hand(model, optimizer):
    for p in model.parameters():
        p.grad.detach_()
        p.grad.zero_()


def remove_by_hand(model, optimizer):
    for p in model.parameters():
        p.grad = None


DISCARDS = {
    "optimizer.zero_grad()": lambda _, optimizer: optimizer.zero_grad(),
    "optimizer to zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda model, _: model.zero_grad(),
    "model to zeros": lambda model, _: model.zero_grad(set_to_none=False),
    "zeros by hand": zero_by_hand,
    "None by hand": remove_by_hand,
}
METHODS = {
    "expand": {},
    "reduce": {"weight_sharing": "reduce"},
    "ekfac": {"method": "ekfac"},
    "sc20": {"factor_convention": "sc20"},
    "background": {"background": True},
}


def step_with(model, first, *, size=6, seeds=(1, 2), between=lambda *_: None, **options):
    """Return the results of a step with passes for ``seeds``, in which ``first`` runs first."""
    kfac = kfac_of(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    training_pass(model, kfac, 0)
    kfac.step()
    optimizer.zero_grad()
    first(model, kfac, optimizer)
    for seed in seeds:
        training_pass(model, kfac, seed, 1 / len(seeds))
        between(model, optimizer)
    kfac.step()
    moments = kfac._executor.store.second_moments
    results = {"f": factors_of(kfac), "g": grads_of(model), "m": dict(moments)}
    kfac.detach()
    return results


@FISHERS
@pytest.mark.parametrize("name", DISCARDS)
def test_a_discarded_pass_leaves_no_statistics(net, name, fisher):
    def first(model, kfac, optimizer):
        training_pass(model, kfac, 77, loss_weight=5.0)
        DISCARDS[name](model, optimizer)

    got = step_with(copy.deepcopy(net), first, fisher=fisher)
    assert_same(got, step_with(copy.deepcopy(net), lambda *_: None, fisher=fisher), 1e-10)


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("name", ["optimizer.zero_grad()", "optimizer to zeros"])
@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_a_micro_batch_whose_loss_was_not_finite(net, name, options, seeds):
    """A common loop discards it with zero_grad() and goes on with the next one."""

    def first(model, kfac, optimizer):
        training_pass(model, kfac, 70)
        training_pass(model, kfac, 71, loss_weight=float("nan"))
        DISCARDS[name](model, optimizer)

    got = step_with(copy.deepcopy(net), first, seeds=seeds, **options)
    want = step_with(copy.deepcopy(net), lambda *_: None, seeds=seeds, **options)
    assert_same(got, want, 1e-10)


def clip(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_without_foreach(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=False)


def unscale(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)


def average(model, optimizer):
    """Average over ranks, as Horovod and Apex do, here over one."""
    for p in model.parameters():
        p.grad.copy_(p.grad.clone().div_(1))


@FISHERS
@pytest.mark.parametrize("change", [clip, clip_without_foreach, unscale, average])
def test_a_change_of_the_gradient_keeps_the_statistics(net, change, fisher):
    got = step_with(copy.deepcopy(net), lambda *_: None, between=change, fisher=fisher)["f"]
    want = step_with(copy.deepcopy(net), lambda *_: None, fisher=fisher)["f"]
    assert_same(got, want, 1e-10)


def test_a_gradient_that_was_clipped_out_of_place_keeps_the_statistics(net):
    def replace(model, optimizer):
        for p in model.parameters():
            p.grad = p.grad * 0.5

    got = step_with(copy.deepcopy(net), lambda *_: None, seeds=(1,), between=replace)["f"]
    want = step_with(copy.deepcopy(net), lambda *_: None, seeds=(1,))["f"]
    assert_same(got, want, 1e-10)


def test_a_gradient_that_is_zero_in_each_pass_keeps_the_statistics(net):
    """The last layer starts at zero, so the layers before it have no gradient at first."""
    model = copy.deepcopy(net)
    nn.init.zeros_(model.last.weight)
    results = [step_with(copy.deepcopy(model), lambda *_: None, seeds=(1, 2)) for _ in range(2)]
    assert_same(*results, 0)
    assert not torch.equal(results[0]["f"]["first"]["A"][0], torch.eye(5))


@pytest.mark.parametrize("to_none", [True, False])
def test_a_layer_that_only_the_discarded_pass_used(net, to_none):
    """It keeps its factors, as it has no gradient of its own in this step."""
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "other": nn.Linear(4, 3)})
    kfac = kfac_of(model)
    x, y = batch(0)
    F.cross_entropy(model["other"](x).mean(1), y).backward()
    model.zero_grad(set_to_none=to_none)
    if not to_none:
        with kfac.pause():  # zeros are recognized when a later pass begins
            pass
    F.cross_entropy(model["used"](x).mean(1), y).backward()
    kfac.step()
    weights = {n: float(s["A"]["weight"]) for n, s in kfac.state_dict()["layers"].items()}
    assert weights == {"used": 1.0, "other": 0.0}
    assert kfac.dropped_statistics == 0


def test_a_discarded_pass_before_a_paused_one(net):
    """The paused pass makes a new .grad, which must not hide that the old one is gone."""
    model = copy.deepcopy(net)
    kfac = kfac_of(model)
    training_pass(model, kfac, 0)
    model.zero_grad()
    with kfac.pause():
        training_pass(model, kfac, 1)
    assert not kfac._capture.pop()


@pytest.mark.parametrize("options", [{}, {"background": True}])
def test_a_backward_that_fails_leaves_no_statistics(net, options):
    """A loop may catch the exception of a bad batch and go on with the next one."""

    def fail(module, grad_input, grad_output):
        raise ArithmeticError("a bad batch")

    def first(model, kfac, optimizer):
        handle = model.attention.register_full_backward_hook(fail)
        with pytest.raises(ArithmeticError):
            training_pass(model, kfac, 77)
        handle.remove()
        optimizer.zero_grad()

    got = step_with(copy.deepcopy(net), first, **options)
    assert_same(got, step_with(copy.deepcopy(net), lambda *_: None, **options), 1e-10)


def test_labels_of_a_discarded_pass_before_zero_grad(net):
    """fisher_backward, then zero_grad: rather no statistics in this step than wrong ones."""
    model = copy.deepcopy(net)
    kfac = kfac_of(model, fisher="mc")
    training_pass(model, kfac, 0)
    output = model(batch(1)[0])
    kfac.fisher_backward(output)
    model.zero_grad()
    output.sum().backward()
    assert not kfac._capture.pop()


class Gan:
    """The DCGAN loop of PyTorch's examples, on vectors."""

    def __init__(self, **options):
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        networks = (self.generator, self.critic)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in networks]
        self.kfacs = [kfac_of(m, **options) for m in networks]

    def loss(self, network, x, label, kfac=None):
        output = network(x).squeeze(1)
        if kfac is not None:
            kfac.fisher_backward(output.unsqueeze(1), "bernoulli")
        return F.binary_cross_entropy_with_logits(output, torch.full((len(x),), label))

    def step(self, seed, *, to_none, judge):
        """``judge`` is the critic whose gradient the generator gets."""
        generator_kfac, critic_kfac = self.kfacs
        for_generator, for_critic = self.optimizers
        torch.manual_seed(seed)
        fake = self.generator(torch.randn(6, 3))
        generator_kfac.fisher_backward(fake, "gaussian")
        for_critic.zero_grad(set_to_none=to_none)
        self.loss(self.critic, torch.randn(6, 4) + 1, 1.0, critic_kfac).backward()
        self.loss(self.critic, fake.detach(), 0.0, critic_kfac).backward()
        critic_kfac.step()
        for_critic.step()
        for_generator.zero_grad(set_to_none=to_none)
        self.loss(judge(self.critic), fake, 1.0).backward()
        generator_kfac.step()
        for_generator.step()


@FISHERS
@pytest.mark.parametrize("to_none", [True, False])
def test_a_gan(fisher, to_none):
    """The generator's pass leaves gradients in the critic, which the next zero_grad() discards."""
    results = []
    for judge in (lambda critic: critic, copy.deepcopy):  # a copy has no hooks
        gan = Gan(fisher=fisher, factor_update_freq=2, update_freq=2)
        for seed in range(5):
            gan.step(seed, to_none=to_none, judge=judge)
        results.append({str(i): factors_of(kfac) for i, kfac in enumerate(gan.kfacs)})
    assert_same(*results, 1e-10)


def test_an_update_that_the_scaler_skipped():
    """With attach(), K-FAC runs inside optimizer.step(), which the scaler leaves out."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    kfac = KFAC(model, optimizer, factor_update_freq=1, update_freq=1).attach(scaler)
    x = torch.randn(6, 4)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(factor * model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    for factor in "AG":
        assert float(kfac.state_dict()["layers"][""][factor]["weight"]) == pytest.approx(1.95)
    assert kfac.steps == 2
    assert kfac.dropped_statistics == 0
