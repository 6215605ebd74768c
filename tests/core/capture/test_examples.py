"""Which rows belong to one example: the batch of the model says it, not the input of each layer."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from kfac_bench.core.capture.examples import Examples
from tests.support import oracle
from tests.support.distributed import run_ranks
from tests.support.layer_checks import assert_close, assert_same, factors_of, grads_of, kfac_of

pytestmark = pytest.mark.usefixtures("double")
N, T, D = 6, 4, 5
WAYS = pytest.mark.parametrize(
    "options",
    [{}, {"weight_sharing": "reduce"}, {"method": "ekfac"}, {"background": True}],
    ids=str,
)
PARTS = pytest.mark.parametrize("sizes", [[N], [2, 3, 1]])


def step(model, x, sizes=(N,), dim=0, **options):
    """Factors and preconditioned gradients after a step in micro-batches of ``sizes``."""
    kfac = kfac_of(model, **options)
    for part in x.split(list(sizes), dim):
        output = model(part)
        if options.get("fisher"):
            kfac.fisher_backward(output, "gaussian")
        (output.square() + output.tanh()).sum().div(x.shape[dim]).backward()
    kfac.step()
    result = {"factors": factors_of(kfac), "grads": grads_of(model)}
    kfac.detach()
    return result


class Positions(nn.Module):
    """Tokens and positions, whose ids have no batch or one for each example."""

    def __init__(self, shape):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, D), nn.Embedding(T, D)
        self.head, self.shape = nn.Linear(D, 3), shape

    def forward(self, x):
        ids, h = torch.arange(T), self.tokens(x)
        match self.shape:
            case "each":
                h = h + self.positions(ids.expand(len(x), T))
            case "[1, T]":
                h += self.positions(ids[None])
            case "[T]":
                h = self.positions(ids) + h
            case "unsqueeze":
                h = h + self.positions(ids).unsqueeze(0)
            case "product":
                h = h * self.positions(ids[None])
        return self.head(h.tanh())


@WAYS
@PARTS
@pytest.mark.parametrize("shape", ["[1, T]", "[T]", "unsqueeze"])
def test_positions_count_for_each_example(shape, sizes, options):
    one, other, x = Positions(shape), Positions("each"), torch.randint(9, (N, T))
    other.load_state_dict(one.state_dict())
    recorder = oracle.Calls([other.positions])
    want = step(other, x, **options)
    assert_same(step(one, x, sizes, **options), want)
    rows = oracle.layer_rows(other.positions, *recorder.calls[other.positions][0])
    a, g = oracle.layer_factors([rows], options.get("weight_sharing") == "reduce")
    assert_close(want["factors"]["positions"]["G"], g)
    assert_close(want["factors"]["positions"]["A"], a.diagonal(dim1=1, dim2=2))


def test_a_label_of_each_example_is_no_position():
    """As many examples as tokens: only the place of the sum tells them apart."""

    class Labelled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.labels, self.head, self.scale = nn.Embedding(9, D), nn.Linear(D, 3), scale

        def forward(self, x):
            labels = self.labels(x[:, 0])
            labels = labels if self.scale is None else self.scale * labels  # no sum of the lookup
            return self.head((torch.nn.functional.one_hot(x, D) + labels[:, None]).tanh())

    one, other, x = Labelled(None), Labelled(1.0), torch.randint(min(9, D), (T, T))
    other.load_state_dict(one.state_dict())
    assert_same(step(one, x, [T]), step(other, x, [T]))


def test_positions_of_a_model_that_returns_its_loss():
    class Loss(Positions):
        def forward(self, x):
            return super().forward(x).square().mean()

    one, other, x = Loss("[1, T]"), Loss("each"), torch.randint(9, (N, T))
    other.load_state_dict(one.state_dict())
    results = []
    for model in (one, other):
        kfac = kfac_of(model)
        model(x).backward()
        kfac.step()
        results.append(factors_of(kfac))
    assert_same(*results)


@pytest.mark.parametrize("shape", ["[1, T]", "[T]"])
def test_positions_with_the_exact_fisher(shape):
    one, other, x = Positions(shape), Positions("each"), torch.randint(9, (N, T))
    other.load_state_dict(one.state_dict())
    want = step(other, x, fisher="type2")
    assert_same(step(one, x, [2, 3, 1], fisher="type2"), want)


def test_positions_whose_examples_are_unknown_are_left_to_the_optimizer():
    model, x = Positions("product"), torch.randint(9, (N, T))
    with pytest.warns(UserWarning, match=r"'positions' got one input for 6 examples.*to skip"):
        whole = step(model, x)
    model.zero_grad()
    with pytest.warns(UserWarning, match="got one input"):
        assert_same(step(model, x, [2, 3, 1]), whole)


def test_positions_after_a_forward_that_failed():
    """Checkpointing ends a repeated forward by an exception, too."""

    class Failing(Positions):
        def forward(self, x):
            output = super().forward(x)
            if len(x) > N:
                raise torch.OutOfMemoryError
            return output

    model, x = Failing("[1, T]"), torch.randint(9, (N, T))
    want = step(model, x)
    model.zero_grad()
    kfac = kfac_of(model)
    with pytest.raises(torch.OutOfMemoryError):
        model(x.repeat(2, 1))
    output = checkpoint(model, x, use_reentrant=False)
    (output.square() + output.tanh()).sum().div(N).backward()
    kfac.step()
    assert_same({"factors": factors_of(kfac), "grads": grads_of(model)}, want)


class Policy(nn.Module):
    """A recurrent model that calls ``meanwhile`` while it trains."""

    def __init__(self):
        super().__init__()
        self.body, self.rnn, self.head = nn.Linear(D, D), nn.LSTM(D, 3), nn.Linear(3, 2)
        self.meanwhile = lambda: None
        for module in (self.body, self.rnn):
            module.register_forward_pre_hook(self._before)

    def _before(self, module, inputs):
        if torch.is_grad_enabled():
            self.meanwhile()

    def forward(self, x):
        return self.head(self.rnn(self.body(self.body(x)).tanh())[0])


def test_another_thread_may_run_the_model_without_gradients():
    model, x = Policy(), torch.randn(T, N, D)
    want = step(model, x, dim=1)
    model.zero_grad()
    with ThreadPoolExecutor(1) as pool:
        act = torch.no_grad()(lambda: model(x[:, :1]))
        model.meanwhile = lambda: pool.submit(act).result()
        assert_same(step(model, x, dim=1), want)


class Sequences(nn.Module):
    """All that may get the time first."""

    def __init__(self, batch_first):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, 4), nn.Embedding(T, 4)
        self.block = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=batch_first)
        self.rnn, self.head = nn.GRU(4, D, batch_first=batch_first), nn.Linear(D, 3)

    def forward(self, x):
        positions = self.positions(torch.arange(T))
        h = self.tokens(x) + (positions if self.rnn.batch_first else positions[:, None])
        return self.head(self.rnn(self.block(h))[0])


@WAYS
@PARTS
def test_time_first_gives_the_same_as_batch_first(sizes, options):
    one, other, x = Sequences(False), Sequences(True), torch.randint(9, (N, T))
    other.load_state_dict(one.state_dict())
    assert_same(step(one, x.T, sizes, 1, **options), step(other, x, **options))


class Moving(Sequences):
    """Gets the batch first, and moves the time to the front itself."""

    def forward(self, x):
        h = (self.tokens(x) + self.positions(torch.arange(T))).transpose(0, 1)
        return self.head(self.rnn(self.block(h))[0])


@WAYS
def test_time_that_the_model_moves_gives_the_same_as_batch_first(options):
    one, other, x = Moving(False), Sequences(True), torch.randint(9, (N, T))
    other.load_state_dict(one.state_dict())
    assert_same(step(one, x, **options), step(other, x, **options))


class Experts(nn.Module):
    """A mixture whose experts get 30, 8 and 2 of 40 examples; all inputs are of length 1."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, 3, bias=False) for _ in range(3))
        weights = torch.arange(9.0 * D).sin().view(3, 3, D)
        for expert, weight in zip(self.experts, weights, strict=True):
            expert.weight.data.copy_(weight)

    def forward(self, x):
        out = x.new_zeros(len(x), 3)
        for i, expert in enumerate(self.experts):
            at = x[:, 0] == i
            out[at] = expert(F.normalize(x[at, 1:], dim=-1)).tanh()
        return out


def tokens():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, D + 1, generator=generator, dtype=torch.float64)
    x[:, 0] = torch.tensor([0.0] * 14 + [1.0] * 5 + [2.0] + [0.0] * 16 + [1.0] * 3 + [2.0])
    return x


def exact_fisher(x):
    """The second moment of the gradients of each example, by layer."""
    model, total = Experts().double(), {}
    for one in x:
        model.zero_grad()
        output = model(one[None])
        (output.square() + output.tanh()).sum().backward()
        for i, expert in enumerate(model.experts):
            grad = torch.zeros(3, D) if expert.weight.grad is None else expert.weight.grad
            total[i] = total.get(i, 0) + torch.outer(grad.flatten(), grad.flatten()) / len(x)
    return total


def check_experts(factors, rtol=1e-7):
    x = tokens()
    for i, fisher in exact_fisher(x).items():
        a, g = (m.squeeze(0).double() for m in factors[f"experts.{i}"].values())
        assert_close(a.trace() * g.trace(), fisher.trace(), rtol)
        # Inputs have the length 1: the sum over the inputs of the Fisher matrix is G.
        assert_close(g, fisher.view(3, D, 3, D).diagonal(dim1=1, dim2=3).sum(-1), rtol)
        rows = F.normalize(x[x[:, 0] == i, 1:], dim=-1)
        assert_close(a, rows.T @ rows / len(rows), rtol)


@WAYS
@pytest.mark.parametrize("sizes", [[40], [18, 3, 19], [1] * 40])
def test_an_expert_has_the_size_of_the_exact_fisher(sizes, options):
    """Also if some micro-batches have no tokens for it."""
    check_experts(step(Experts(), tokens(), sizes, **options)["factors"])


def experts_on_a_rank(options):
    """Rank 0 has 24 of the examples."""
    x = tokens().float().split([24, 16])[torch.distributed.get_rank()]
    sizes = [len(x)] if "overlap" in options else [len(x) - 7, 7]
    return step(Experts(), x, sizes, **options)["factors"]


@pytest.mark.ranks
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
def test_experts_on_ranks(options):
    for factors in run_ranks(2, experts_on_a_rank, options):
        check_experts(factors, 1e-5)


def test_papers_conventions_count_by_the_input_of_each_layer():
    model, x = Experts(), tokens()
    recorder = oracle.Calls(model.experts)
    for convention in ("sc20", "kaisa"):
        factors = step(model, x, [40], factor_convention=convention)["factors"]
        for i, expert in enumerate(model.experts):
            a, g = oracle.factors(expert, *recorder.calls[expert].pop(), convention)
            assert_close(factors[f"experts.{i}"]["A"][0], a)
            assert_close(factors[f"experts.{i}"]["G"][0], g)
        model.zero_grad()


@pytest.mark.parametrize(
    ("inputs", "count"),
    [
        ((torch.ones(3, 2, 5),), 3),
        (({}, {"mask": None, "x": {"ids": torch.ones(4, 2)}}), 4),
        ((torch.tensor(0.5), torch.ones(3, 2)), 3),  # a time, as of diffusion
        ((torch.ones(3, dtype=torch.long),), 3),
        ((torch.ones(3),), None),  # perhaps the features of one example
        ((), None),
        ((torch.ones(0, 2), torch.ones(3, 2)), 3),  # a memory that is empty yet
        (([torch.ones(3, 8, 8)] * 2, [{"labels": torch.ones(7)}]), None),  # as of Mask R-CNN
        (((torch.ones(5, 3), torch.ones(2, 9)),), 5),  # nodes and edges
        ((pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]),), 2),
    ],
)
def test_the_inputs_of_the_model_tell_the_examples(inputs, count):
    assert Examples(inputs, 1).count == count


def test_rows_of_other_calls():
    """Boxes of two pictures; a layer that is called after the model."""

    class Boxes(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.after = nn.Conv2d(3, 4, 3), nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, pictures):
            h = self.body(pictures).flatten(2).mT
            return self.head(h[:, :5].flatten(0, 1))

    model, x = Boxes(), torch.randn(2, 3, 6, 6)
    recorder = oracle.Calls([model.head, model.after])
    kfac = kfac_of(model)
    model.after(model(x)).square().sum().backward()
    kfac.step()
    factors = factors_of(kfac)
    for layer, count in ((model.head, 2), (model.after, 10)):
        _, g = recorder.calls[layer][0]
        name = "head" if layer is model.head else "after"
        assert_close(factors[name]["G"][0], count * g.mT @ g)
    kfac.detach()


def test_a_picture_without_a_batch_is_one_example():
    model, x, results = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 6, 6), []
    for given in (x, x[0]):
        model.zero_grad()
        kfac = kfac_of(model)
        model(given).square().sum().backward()
        kfac.step()
        results.append(factors_of(kfac))
        kfac.detach()
    assert_same(*results)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("x", [torch.arange(N * T).view(N, T) % 9, torch.rand(N, T)], ids=str)
def test_an_attribute_of_the_model_does_not_make_its_batch_one_example(x, batch_first):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(1, D) if x.is_floating_point() else nn.Embedding(9, D)
            self.head = nn.Linear(D, 3)

        def forward(self, x):
            return self.head(self.embed(x[..., None] if x.is_floating_point() else x))

    results = []
    for has_attribute in (False, True):
        torch.manual_seed(0)
        model = Tagger()
        if has_attribute:
            model.batch_first = batch_first
        inputs = x.to(torch.get_default_dtype()) if x.is_floating_point() else x
        results.append(step(model, inputs, skip=[]))
    assert_same(results[1]["factors"], results[0]["factors"])
    assert_same(results[1]["grads"], results[0]["grads"])
