"""Only a backward that adds to ``.grad`` of the covered weights leaves statistics."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.layer_checks import assert_same, factors_of, grads_of, kfac_of

pytestmark = pytest.mark.usefixtures("double")

FISHERS = pytest.mark.parametrize("fisher", ["empirical", "mc", "type2"])


class Net(nn.Module):
    """Two linear layers and attention, perhaps with checkpointing."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.use_reentrant = use_reentrant

    def block(self, h):
        return self.last(self.attention(h, h, h)[0].tanh())

    def forward(self, x):
        h = self.first(x).tanh()
        if self.use_reentrant is None:
            return self.block(h).mean(1)
        return checkpoint(self.block, h, use_reentrant=self.use_reentrant).mean(1)


def batch(seed, samples=6):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 5, 4, generator=generator)
    return x, torch.randint(3, (samples,), generator=generator)


def training_pass(model, kfac, seed, loss_weight=1.0):
    x, y = batch(seed)
    torch.manual_seed(seed)  # fisher="mc" draws labels
    output = model(x)
    kfac.fisher_backward(output)
    (loss_weight * F.cross_entropy(output, y)).backward()


def loss_with_input(model, seed=50):
    """A loss, and an input that wants a gradient."""
    x, y = batch(seed, samples=7)
    x.requires_grad_()
    return 3 * F.cross_entropy(model(x), y), x


def adversarial_example(model, kfac):
    loss, x = loss_with_input(model)
    torch.autograd.grad(loss, x)


def gradient_of_inputs(model, kfac):
    loss, x = loss_with_input(model)
    loss.backward(inputs=[x])
    assert x.grad is not None


def gradient_of_biases(model, kfac):
    loss, _ = loss_with_input(model)
    loss.backward(inputs=[p for name, p in model.named_parameters() if "bias" in name])


def gradient_of_weights(model, kfac):
    loss, _ = loss_with_input(model)
    torch.autograd.grad(loss, list(model.parameters()))


def batched_gradient_of_weights(model, kfac):
    loss, _ = loss_with_input(model)
    seeds = torch.ones(2, dtype=loss.dtype)
    torch.autograd.grad(loss, list(model.parameters()), seeds, is_grads_batched=True)


def functional_gradient(model, kfac):
    x, y = batch(50)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights):
        return F.cross_entropy(torch.func.functional_call(model, weights, x), y)

    torch.func.grad(loss)(weights)


def frozen(model, kfac):
    model.requires_grad_(False)
    loss, x = loss_with_input(model)
    loss.backward()
    model.requires_grad_(True)
    assert x.grad is not None


def evaluation(model, kfac):
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.eval()
    loss_with_input(model)[0].backward()
    model.train()
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad


def paused(model, kfac):
    with kfac.pause():
        loss, x = loss_with_input(model)
        kfac.fisher_backward(model(x))
        loss.backward()


def paused_backward(model, kfac):
    loss, _ = loss_with_input(model)
    with kfac.pause():
        loss.backward()


OTHER_PASSES = {
    f.__name__: f
    for f in (
        adversarial_example,
        gradient_of_inputs,
        gradient_of_biases,
        gradient_of_weights,
        batched_gradient_of_weights,
        functional_gradient,
        frozen,
        evaluation,
        paused,
        paused_backward,
    )
}


def train(model, other, where, run=None, **options):
    """Return the factors after two steps, with ``other`` before or after the training pass."""
    kfac = kfac_of(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(2):
        optimizer.zero_grad()
        if where == "before":
            other(model, kfac)
        training_pass(model if run is None else run, kfac, step)
        if where == "after":
            other(model, kfac)
        kfac.step()
        optimizer.zero_grad()  # the other pass may have changed .grad
        training_pass(model, kfac, step + 10)
        optimizer.step()
        optimizer.zero_grad()
    factors = factors_of(kfac)
    kfac.detach()
    return factors


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().double()


@FISHERS
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("name", OTHER_PASSES)
def test_another_pass_leaves_no_statistics(net, name, where, fisher):
    got = train(copy.deepcopy(net), OTHER_PASSES[name], where, fisher=fisher)
    assert_same(got, train(copy.deepcopy(net), lambda *_: None, where, fisher=fisher), 1e-12)


def per_sample_gradients(model, x):
    def loss(weights, one):
        return torch.func.functional_call(model, weights, one[None]).sum()

    weights = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "jacrev": lambda model, x: torch.func.jacrev(lambda x: model(x).sum(0))(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "vmap of grad": per_sample_gradients,
    "vectorized": lambda model, x: torch.autograd.functional.jacobian(
        lambda x: model(x).sum(0), x, vectorize=True
    ),
    "trace": lambda model, x: torch.jit.trace(model.first, x),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transformed_pass_runs_and_leaves_no_statistics(net, name):
    def other(model, kfac):
        TRANSFORMS[name](model, batch(50)[0].double())

    got = train(copy.deepcopy(net), other, "before")
    assert_same(got, train(copy.deepcopy(net), lambda *_: None, "before"), 1e-12)


@pytest.mark.parametrize("method", ["inverse", "ekfac"])
def test_an_adversarial_example_with_other_options(net, method):
    options = {"method": method, "weight_sharing": "reduce"}
    got = train(copy.deepcopy(net), adversarial_example, "before", **options)
    assert_same(got, train(copy.deepcopy(net), lambda *_: None, "before", **options), 1e-12)


@pytest.mark.slow
def test_an_adversarial_example_through_torch_compile(net):
    model = copy.deepcopy(net)
    compiled = torch.compile(model, backend="aot_eager")
    options = {"factor_update_freq": 2, "update_freq": 2}  # the second step runs compiled
    got = train(
        model, lambda _, kfac: adversarial_example(compiled, kfac), "before", compiled, **options
    )
    torch.compiler.reset()
    assert_same(got, train(copy.deepcopy(net), lambda *_: None, "before", **options), 1e-12)


def test_an_adversarial_example_through_checkpointing(net):
    model = Net(use_reentrant=False)
    model.load_state_dict(net.state_dict())
    got = train(model, adversarial_example, "before")
    assert_same(got, train(copy.deepcopy(net), lambda *_: None, "before"), 1e-12)


def test_the_graph_of_an_adversarial_example_may_train_later(net):
    """FGSM with one forward: the gradient of the input first, then that of the weights."""
    results = []
    for is_adversarial in (True, False):
        model = copy.deepcopy(net)
        kfac = kfac_of(model)
        loss, x = loss_with_input(model)
        if is_adversarial:
            torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        kfac.step()
        results.append({"f": factors_of(kfac), "g": grads_of(model)})
    assert_same(*results, 1e-12)


@FISHERS
def test_adversarial_training(net, fisher):
    """FGSM: the model trains on inputs that were moved along the sign of their gradient."""
    results = []
    for model_of_attack in (lambda model: model, copy.deepcopy):
        model = copy.deepcopy(net)
        kfac = kfac_of(model, fisher=fisher)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            x, y = batch(step)
            x.requires_grad_()
            # A copy of the model has no hooks, so its passes cannot count.
            loss = F.cross_entropy(model_of_attack(model)(x), y)
            attacked = (x + 0.1 * torch.autograd.grad(loss, x)[0].sign()).detach()
            optimizer.zero_grad()
            torch.manual_seed(step)
            output = model(attacked)
            kfac.fisher_backward(output)
            F.cross_entropy(output, y).backward()
            kfac.step()
            optimizer.step()
        results.append({"f": factors_of(kfac), "g": grads_of(model)})
    assert_same(*results, 1e-12)


def test_a_gradient_penalty():
    """WGAN-GP: the inner gradient leaves nothing, and what its derivative reaches counts once."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    kfac = kfac_of(critic)
    real, fake = torch.randn(5, 4), torch.randn(5, 4)
    between = (0.3 * real + 0.7 * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
    kfac.step()
    # Three calls of the first layer, and the use of its weight in the derivative. It has no bias.
    for name, inputs, rows in (("0", [real, fake, between], 20), ("2", [real, fake], 15)):
        a = factors_of(kfac)[name]["A"][0] * rows
        torch.testing.assert_close(a[-1, -1], torch.tensor(5.0 * len(inputs)))
        ones = [critic[1](critic[0](x)) if name == "2" else x for x in inputs]
        torch.testing.assert_close(a[-1, :-1], torch.cat(ones).sum(0).detach())


def test_two_losses_with_two_backwards_both_count(net):
    """As if each loss had a forward of its own."""
    results = []
    for has_two_forwards in (False, True):
        model = copy.deepcopy(net)
        kfac = kfac_of(model)
        x, y = batch(0)
        output = model(x)
        F.cross_entropy(output, y).backward(retain_graph=True)
        (model(x) if has_two_forwards else output).square().mean().backward()
        kfac.step()
        results.append({"f": factors_of(kfac), "g": grads_of(model)})
    assert_same(*results, 1e-10)


def test_pause_is_nested_and_ends_with_an_exception(net):
    model = copy.deepcopy(net)
    kfac = kfac_of(model)

    def leaves_statistics():
        training_pass(model, kfac, 0)
        return bool(kfac._capture._moments._collected)

    with kfac.accumulate(), kfac.pause():
        with pytest.raises(ZeroDivisionError), kfac.pause():
            raise ZeroDivisionError
        assert not leaves_statistics()
    assert leaves_statistics()
    kfac.detach()
    with kfac.pause():  # allowed without hooks
        model(batch(0)[0])


def test_pause_in_each_combination_with_the_forward_and_the_backward(net):
    for in_forward, in_backward in itertools.product((False, True), repeat=2):
        model = copy.deepcopy(net)
        kfac = kfac_of(model)
        with kfac.pause() if in_forward else kfac.accumulate():
            output = model(batch(0)[0])
        with kfac.pause() if in_backward else kfac.accumulate():
            output.sum().backward()
        counts = bool(kfac._capture.pop())
        assert counts == (not in_forward and not in_backward)
        assert model.first.weight.grad is not None
